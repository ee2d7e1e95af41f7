"""The card of sampled texts: that they are synthetic, what is guaranteed about them, and how they were drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from dptune.core.files import sha256
from dptune.job.delivery.finished_adapter import FinishedAdapter
from dptune.job.delivery.privacy_section import NO_GUARANTEE, guarantee_rows, has_guarantee, table, why_not
from dptune.job.delivery.weights import read_base, weights_file
from dptune.privacy.certificate import FILE
from dptune.privacy.run_folder import RunFolder

_LIBRARIES = ("dptune", "peft", "torch", "transformers")
_USE = (
    "- Statistics of this file, and models trained on it, with privacy or without, cost nothing more. An epsilon that "
    "such a training prints is about rows of this file, not about people.",
    "- **A further run on the same units pays on top.** It may use this file as its public records, or to choose its "
    "settings; but it builds on what the adapter released, so its own epsilon and delta **add to** those above. "
    "A run on records of other people pays only for those people.",
)


def synthetic_card(
    adapter: FinishedAdapter,
    name: str,
    digest: str,
    *,
    settings: Mapping[str, Any],
    figures: Mapping[str, float],
    prompts: str,
    notes: Sequence[str],
) -> str:
    """The card of the file ``name``.

    Args:
        digest: SHA-256 of the file.
        settings: how the texts were drawn.
        figures: the result of ``sampling.summary_of``.
        prompts: name of the prompts; empty where there were none.
        notes: what the reader should know of these texts.
    """
    ledger, base = RunFolder(adapter.path).ledger, read_base(adapter.path)
    weights = weights_file(adapter.path)
    files = {path.name: path for path in (ledger, adapter.path / FILE, weights) if path.is_file()}
    rows = {
        **guarantee_rows(adapter.contents, adapter.certificate),
        "data": adapter.contents.header.data,
        **({} if base is None else {"the adapter's base model": base.row}),
        **{f"the adapter's {file}": f"SHA-256 {sha256(path)}" for file, path in files.items()},
        name: f"SHA-256 {digest}",
    }
    given = {"prompts": prompts} if prompts else {}
    shown = {**settings, **given, **{library: version(library) for library in _LIBRARIES}}
    lines = [
        f"# {'' if has_guarantee(adapter.epsilon) else f'{NO_GUARANTEE}: '}SYNTHETIC texts: {name}",
        "",
        "A language model that dptune tuned on private records wrote every row; `dptune sample` drew them.",
        "",
        *(f"Note: {note}.\n" for note in notes),
        "## Privacy",
        "",
        *table(rows),
        "",
        *_guarantee(adapter, prompts),
        "",
        "Not covered:",
        "",
        *(f"- {one}" for one in _not_covered(adapter, prompts)),
        "",
        "## Use",
        "",
        *(_USE if has_guarantee(adapter.epsilon) else ("- Treat this file like the records themselves.",)),
        "",
        "## Texts",
        "",
        *table({name.replace("_", " "): f"{value:.6g}" for name, value in figures.items()}),
        "",
        "These figures describe only this file; no record was read for them.",
        "",
        "## Settings",
        "",
        *table({name: str(value) for name, value in shown.items()}),
        "",
        "The seed of the draws need not be secret: what protects is the noise of the training.",
        "",
    ]
    return "\n".join(lines)


def _guarantee(adapter: FinishedAdapter, prompts: str) -> list[str]:
    if not has_guarantee(adapter.epsilon):
        return [f"**{NO_GUARANTEE}: the adapter has no certified epsilon, and so these texts have none.**"]
    given = " and the public prompts" if prompts else ""
    return [
        f"Sampling is post-processing: it read the adapter{given}, and no record. So the adapter's guarantee "
        "above holds for this file, and for all files together that are ever sampled from the adapter. A row may "
        "still equal a record: what is bounded is how much one unit's records changed the chance of that."
    ]


def _not_covered(adapter: FinishedAdapter, prompts: str) -> list[str]:
    found = []
    if not has_guarantee(adapter.epsilon):
        found.append(f"Everything, for: {why_not(adapter.leaks)}.")
    if prompts:
        found.append("The prompts, which this file shows as they were given: they must be public.")
    found += [
        "The weights of the base model, and what it was trained on.",
        "Other adapters from the same records: their epsilons and deltas add up.",
        "Choosing the adapter, the settings of the draws or rows of this file by looking at the private records.",
    ]
    if adapter.certificate is not None:
        found.append("A record that crashes a run: the guarantee assumes that none can.")
    return found + [f"Mistakes in {plugin}, which dptune cannot check." for plugin in adapter.plugins]
