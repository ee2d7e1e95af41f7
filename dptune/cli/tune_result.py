"""What ``dptune tune`` prints of a finished run for people: its epsilons with a word on each, and how to attack it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dptune.cli.accuracy import comparison, printed_scores
from dptune.core.digits import at_most
from dptune.core.metric import CHANGES
from dptune.privacy.run_folder import RunFolder

if TYPE_CHECKING:
    from dptune.job.preparation import PreparedRun
    from dptune.job.run import Tuned
    from dptune.privacy.ledger_file import LedgerContents


_PRINTED = 6


def with_glosses(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of a ledger, with what the card says of each epsilon beside it."""
    from dptune.job.delivery.card import GLOSSES, NOT_MEASURED

    found: dict[str, Any] = {}
    for name, value in figures.items():
        found[name] = f"{at_most(value, _PRINTED)} ({GLOSSES[name]})" if name in GLOSSES else value
        if name == "epsilon_certified":
            found["epsilon_audited"] = NOT_MEASURED
    return found


def figures_of(tuned: Tuned) -> dict[str, float]:
    """Perplexities and scores before and after by name, for their owner; ``scores_of`` has fewer, for people."""
    found: dict[str, float] = {}
    for name, (before, after) in tuned.perplexity.items():
        whose = name.split()[0].replace("-", "_")
        found |= {f"perplexity_before_{whose}": before, f"perplexity_after_{whose}": after}
    for name, scores in tuned.scores.items():
        whose = name.split()[0].replace("-", "_")
        for score, (before, after) in scores.items():
            found |= {f"{score}_before_{whose}": before, f"{score}_after_{whose}": after}
    return found


def where_figures_stay(tuned: Tuned) -> Iterator[str]:
    """A sentence for the owner where figures of held-out private records were shown."""
    from dptune.job.result import HELD_OUT

    if HELD_OUT in {**tuned.perplexity, **tuned.scores}:
        folder, measure = RunFolder(tuned.folder), "Accuracy" if tuned.scores else "Perplexity"
        yield (
            f"{measure} of held-out records is a statistic of private records, which the guarantee does not cover: it "
            f"stays in {folder.result}, and {folder.adapter} does not show it."
        )


def what_counts(contents: LedgerContents) -> str:
    """A sentence on the guarantee of a run."""
    header = contents.header
    unit = "record" if header.unit == "record" else f"unit `{header.unit}` with all its records"
    price = f"{at_most(contents.epsilons.certified, _PRINTED)} at delta {at_most(header.delta)}"
    return f"epsilon_certified is the one that counts: {price}, for adding or removing one {unit}."


def scores_of(tuned: Tuned, prepared: PreparedRun) -> tuple[dict[str, float], list[str]]:
    """A classifier's scores before and after by name, and what is to be said of them."""
    told, said = dict[str, float](), list[str]()
    changes = {metric.name for metric in CHANGES}
    for name, scores in tuned.scores.items():
        whose = name.split()[0].replace("-", "_")
        records = prepared.counts["public" if whose == "public" else "eval"]
        before, after = (
            printed_scores({score: pair[place] for score, pair in scores.items()}, records) for place in (0, 1)
        )
        for score, value in after.items():
            told |= {f"{score}_before_{whose}": before[score]} if score in changes else {}
            told[f"{score}_after_{whose}" if score in changes else f"{score}_{whose}"] = value
        untuned, tuned_scores = ({score: pair[place] for score, pair in scores.items()} for place in (0, 1))
        sentence = comparison(tuned_scores, records, untuned)
        said.append(f"{name[0].upper()}{name[1:]}: {sentence[0].lower()}{sentence[1:]}")
    return told, said


def gains(tuned: Tuned) -> Iterator[str]:
    """A sentence for each side on whether its perplexity is better than before training."""
    for name, (before, after) in tuned.perplexity.items():
        if after < before:
            yield f"Better than no tuning: perplexity of {name} is {after:.4g}, and was {before:.4g}."
        else:
            yield (
                f"No better than the base model: perplexity of {name} was {before:.4g}, and is {after:.4g}. Less noise "
                "in each step (more units, a larger batch, a larger epsilon) or a smaller learning rate may help; "
                "`dptune suggest` tries rates on public records at no cost. Another run on these records adds its own "
                "epsilon."
            )


def about_bands(tuned: Tuned, prepared: PreparedRun) -> Iterator[str]:
    """What became of correlated noise where it is not what the ledger's figures let expect."""
    mechanism = prepared.mechanism.mechanism
    if mechanism.noise.correlated is not None and mechanism.bands == 1:
        yield "With one band this is ordinary, independent noise."
    if tuned.restarts:
        times = "once" if tuned.restarts == 1 else f"{tuned.restarts} times"
        yield (
            f"Correlated noise began anew {times}, where the run had been stopped: as private, but less of it "
            "cancelled than noise_in_recent_sum_at_one_multiplier says."
        )


def attack_of(tuned: Tuned, prepared: PreparedRun) -> Iterator[str]:
    """How to measure ``epsilon_audited``: the command that attacks one step, and what its figures are about."""
    from dptune.mechanisms.registry import plugin_modules

    built, schedule = prepared.mechanism.mechanism, prepared.schedule
    plain = {name: value for name, value in prepared.settings.options.items() if isinstance(value, str | int | float)}
    options = plain | {"noise_multiplier": at_most(built.knobs().noise_multiplier, _PRINTED)}
    if built.noise.correlated is not None:
        options["bands"] = built.bands
    given = " ".join(f"--set {name}={value}" for name, value in options.items())
    plugins = "".join(f"--plugin {module} " for module in plugin_modules(prepared.settings.mechanism, {}))
    delta = f"--delta {tuned.ledger.header.delta:g}"
    if prepared.settings.audit_canaries:
        yield f"Attack this run: dptune audit-run {tuned.folder}"
    else:
        yield "To attack a whole run, tune one with --audit-canaries 256, and give its folder to dptune audit-run."
    yield f"Attack one step: dptune {plugins}audit {prepared.settings.mechanism} {given} {delta}"
    steps, rate = -(-schedule.steps // built.bands), schedule.sample_rate * built.bands
    yield (
        "That prices a single step whose batch holds the sample for certain, where a wrong noise shows best: not the "
        f"epsilons above. With --whole-run --steps {steps} --sample-rate {rate:.6g} it prices and attacks whole runs."
    )
