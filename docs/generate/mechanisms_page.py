"""The page of mechanisms and their parts, from the registry."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from docs.generate.tables import code, plain, table
from dptune.mechanisms.descriptions import describe_options, describe_parts
from dptune.mechanisms.options import option_rows
from dptune.mechanisms.registry import MECHANISMS
from dptune.policy import method
from dptune.prediction.protocols import PROTOCOLS, SUMMARIES

_ABOUT = """# Mechanisms and parts

You get every mechanism, what it clips, adds and follows, whether it is sound, and every option. This page is
generated from the registry; the same lists in a terminal, with those of your plug-ins:

    dptune mechanisms                  # one line each
    dptune mechanisms rldp             # the options of one
    dptune mechanisms --parts          # every clipper, noise and controller

[Mechanisms](../concepts/mechanisms.md) says how an entry of `params.yaml` combines them.
"""
_OPTION = ("option", "default", "meaning")


def page() -> str:
    """The page in Markdown."""
    return _ABOUT + _list() + _options() + _parts()


def _list() -> str:
    head = ("mechanism", "clips", "adds", "adapts by", "verdict")
    rows = [
        (f"[{code(name)}](#{_anchor(name)})", *map(plain, (one.clips, one.adds, one.adapts, one.verdict)))
        for name, one in MECHANISMS.items()
    ]
    return "\n## All mechanisms\n\n" + table(head, rows)


def _options() -> str:
    sections = [_section(name, one.summary, describe_options(name)) for name, one in MECHANISMS.items()]
    others = {**PROTOCOLS, method.NAME: method.Dppg}
    texts = {**SUMMARIES, method.NAME: method.SUMMARY}
    sections += [_section(name, texts[name], option_rows(cls)) for name, cls in others.items()]
    return "\n## Options of each\n" + "".join(sections)


def _parts() -> str:
    sections = [
        _section(
            f"{part.kind} {part.name}",
            part.summary,
            [(name, value or "empty", text) for name, value, text in part.options],
        )
        for part in describe_parts()
    ]
    return "\n## Parts that can be combined\n" + "".join(sections)


def _section(name: str, summary: str, options: Iterable[Sequence[str]]) -> str:
    rows = [(code(option), code(default), plain(text)) for option, default, text in options]
    return f"\n### {plain(name)} {{ #{_anchor(name)} }}\n\n{plain(summary)}\n" + (
        "\n" + table(_OPTION, rows) if rows else ""
    )


def _anchor(name: str) -> str:
    return name.replace(" ", "-")
