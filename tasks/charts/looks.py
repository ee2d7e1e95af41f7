"""One colour, one marker and one order for every mechanism, in all figures and on all pages.

The hues are those of Okabe and Ito (2008), which colour-blind readers tell apart, darkened on white and lightened on
black until they stand out from the ground. Mechanisms outnumber hues, so relatives share one and differ in the marker.
A hollow marker is a mechanism that leaks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: A hue on white and on black.
INK, GREY = ("#1b1f24", "#eef1f4"), ("#70767c", "#838a91")
BLUE, SKY = ("#0067a8", "#2c86d1"), ("#45a2d9", "#7cc8f2")
VERMILLION, ORANGE = ("#c04800", "#e4672e"), ("#c98a00", "#ebb02d")
GREEN, PURPLE = ("#00916a", "#12a67c"), ("#c4689c", "#e08fbe")
#: Ink and grey that are seen on white and on black.
_MIDDLE = {INK[0]: "#4d5761", GREY[0]: "#bcc2c8"}
_PALEST = 0.7  # no tint is as much of white as this
HUES = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY)
SHAPES = ("circle", "square", "diamond", "triangle-up", "triangle-down", "triangle-right", "cross", "triangle-left")


@dataclass(frozen=True)
class Look:
    """How a mechanism is drawn.

    Attributes:
        light: colour on a white ground.
        dark: colour on a black ground.
        shape: name of a marker, as Vega has it.
        hollow: whether the marker has no filling.
    """

    light: str
    dark: str
    shape: str
    hollow: bool = False


def _look(hue: tuple[str, str], shape: str, *, hollow: bool = False) -> Look:
    return Look(*hue, shape, hollow)


#: Registered mechanisms in the order of legends.
_KNOWN = {
    "static": _look(INK, "circle"),
    "banded": _look(INK, "diamond"),
    "per_pair": _look(GREEN, "square"),
    "dp_lora": _look(GREEN, "triangle-up"),
    "dp_lora_fed": _look(GREEN, "diamond"),
    "auto_s": _look(SKY, "triangle-right"),
    "psac": _look(SKY, "triangle-down"),
    "quantile": _look(BLUE, "diamond"),
    "dc_sgd_p": _look(ORANGE, "circle"),
    "dc_sgd_e": _look(ORANGE, "triangle-down"),
    "adaclip": _look(PURPLE, "diamond"),
    "geoclip": _look(PURPLE, "square"),
    "autoclip_published": _look(SKY, "square", hollow=True),
    "rldp": _look(VERMILLION, "triangle-up"),
    "rldp_published": _look(ORANGE, "triangle-up", hollow=True),
    "laplace": _look(SKY, "circle"),
    "plrvo": _look(GREEN, "circle"),
    "lmo_dp": _look(PURPLE, "circle"),
    "pmixed": _look(BLUE, "circle"),
}
_NONPRIVATE = {"nonprivate": _look(GREY, "cross")}


def looks(names: Iterable[str]) -> dict[str, Look]:
    """The look of each mechanism, in the order of legends.

    A registered mechanism looks the same in every experiment. Any other label takes, in alphabetical order, the first
    look that no mechanism of ``names`` has; after 48 of them looks repeat.
    """
    wanted = set(names)
    known = {name: look for name, look in _KNOWN.items() if name in wanted}
    taken = {(look.light, look.shape) for look in known.values()}
    hues = sorted(HUES, key=lambda hue: sum(look.light == hue[0] for look in known.values()))
    # The marker moves on by one more in every round of hues, so that all 48 differ.
    every = [(hues[n % 6], SHAPES[(n + n // 6) % 8]) for n in range(48)]
    free = [one for one in every if (one[0][0], one[1]) not in taken] or every
    others = sorted(wanted - set(_KNOWN) - set(_NONPRIVATE))
    own = {name: _look(*free[place % len(free)]) for place, name in enumerate(others)}
    return known | own | {name: look for name, look in _NONPRIVATE.items() if name in wanted}


def run_colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each mechanism where a chart has no markers and may be on white or black: a hue, or a tint of it."""
    return {name: colour for (name, _), colour in line_colours((name, "") for name in names).items()}


def line_colours(lines: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """A colour for each line of a mechanism, such as one of its budgets, as ``run_colours`` has one for a mechanism.

    Relatives share a hue on our own pages, so here the second and further lines of a hue become lighter.
    """
    wanted = list(dict.fromkeys(lines))
    families: dict[str, list[tuple[str, str]]] = {}
    for name, look in looks(name for name, _ in wanted).items():
        family = families.setdefault(_MIDDLE.get(look.light, look.light), [])
        family += [line for line in wanted if line[0] == name]
    return {
        line: _tint(hue, _PALEST * place / len(family))
        for hue, family in families.items()
        for place, line in enumerate(family)
    }


def _tint(hue: str, share: float) -> str:
    """A hue mixed with white."""
    parts = (int(hue[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(part + share * (255 - part)):02x}" for part in parts)
