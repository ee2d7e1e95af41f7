"""The section "Privacy" of a model card: what follows from a ledger and the weights alone.

So ``verify`` writes it again and compares. Other files that dptune hands on take its rows and sentences too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import ROUND_CEILING, Context

from dptune.core.digits import at_most
from dptune.job.delivery.card_code import cell
from dptune.job.delivery.weights import LORA, NamedBase, form_of
from dptune.privacy.accountants import published_epsilon
from dptune.privacy.accounting.claimed import CLAIMED_BY, renyi_claim
from dptune.privacy.certificate import SearchCertificate
from dptune.privacy.ledger_file import LedgerContents
from dptune.privacy.release import Composition
from dptune.privacy.run_header import RunHeader, composition_of
from dptune.privacy.samplers.sampler import POISSON

START, END = "<!-- dptune: checked by `dptune verify` -->", "<!-- dptune: end -->"
#: Names of rows whose figures earlier versions rounded to the nearest, and today's round up.
DELTA, NOISE, SCORE = "delta", "noise", "score"
#: What each epsilon of a run is, in a few words.
GLOSSES = {
    "epsilon_certified": "what is proved",
    "epsilon_noise_only": "leaks of the controller ignored",
}
NOT_MEASURED = "not measured"
_AUDITED = "not in this section, which is written before any attack: a study has it in audit.json of the run"
_AUDITED_BY_COINS = (
    "not in this section, which is written before any attack: `dptune audit-run` shows it, with the run's folder"
)
_FIGURES = "Figures of private records, which the owner was shown: they are left out here, and no epsilon covers them."
_LABELS = "The names of the labels, which are public."
_TOLD = "on held-out private records, which is told beside the weights: the guarantee is about the weights alone."
#: Lines of the section "Privacy", each with those that earlier versions wrote in its place.
EARLIER = {
    f"| epsilon_audited | {_AUDITED} |": (
        f"| epsilon_audited | {NOT_MEASURED} |",
        f"| epsilon_audited | {_AUDITED.replace('in this section', 'on this card')} |",
    ),
    f"| epsilon_audited | {_AUDITED_BY_COINS} |": (
        f"| epsilon_audited | {_AUDITED_BY_COINS.replace('in this section', 'on this card')} |",
    ),
    f"- {_FIGURES}": (f"- Perplexity {_TOLD}", f"- Accuracy {_TOLD}"),
    f"- {_LABELS}": ("- The names of the labels, whether they were given or read from the records.",),
}
#: The row of own weights that trained, and what it says of their sums; earlier cards name the weights alone.
TRAINED = "weights that trained"
_IN_FLOAT32 = "; gradients are added up in float32, whose rounding a measured margin covers, not a proved one"
#: How the title of a card begins, and the last line of a command, where no epsilon is certified.
NO_GUARANTEE = "NO GUARANTEE"
#: How the first of what is not covered begins, where no epsilon is certified.
EVERYTHING = "Everything, for: "
_DIGITS, _DIGITS_OF_DELTA, _DIGITS_OF_NOISE = 4, 6, 6
_NEIGHBOURS = "data sets of which one lacks a unit of the other (add or remove)"


def has_guarantee(epsilon: float) -> bool:
    """Whether cards, pages and commands may say "differential privacy" of what has this certified epsilon."""
    return math.isfinite(epsilon)


def covered(telemetry: str, subject: str) -> str:
    """What a certified epsilon covers, and what not: ``subject`` is "the adapter", "the answers" or the like.

    >>> covered("research", "the adapter")
    'The guarantee covers the adapter, NOT the curves and metrics computed from private records.'
    """
    if telemetry == "research":
        return f"The guarantee covers {subject}, NOT the curves and metrics computed from private records."
    return (
        f"The guarantee covers {subject} and all published values (releases, public data, an auditor's own secrets), "
        "NOT the times that databases, logs and files keep, which stay with the owner."
    )


def why_not(leaks: Sequence[str]) -> str:
    """Why an epsilon that is not certified is infinite, in words."""
    return "; ".join(leaks) or "its noise is too small"


def privacy_section(
    contents: LedgerContents,
    digests: Mapping[str, str],
    *,
    classifies: bool = False,
    certificate: SearchCertificate | None = None,
    base: NamedBase | None = None,
) -> str:
    """The card's section "Privacy", between the marks ``START`` and ``END``. Epsilons, delta and noise are rounded up.

    Args:
        digests: SHA-256 by file name, of the ledger and of the adapter's and tokenizer's files.
        classifies: whether the weights are a classifier's.
        certificate: of the search whose winner this is; the guarantee is then the whole search's.
        base: the base model; None where an earlier version delivered the folder, and named no digest of it.
    """
    header = contents.header
    rows = {
        **guarantee_rows(contents, certificate),
        **release_rows(contents),
        "data": header.data,
        "telemetry": header.telemetry,
        "run": "finished" if contents.complete else "not finished",
        **({} if base is None else {"base model": base.row}),
        **{name: f"SHA-256 {digest}" for name, digest in digests.items()},
    }
    return "\n".join(
        [
            START,
            "## Privacy",
            "",
            *table(rows),
            "",
            "Not covered:",
            "",
            *(f"- {cell(one)}" for one in not_covered(contents, certificate, classifies=classifies)),
            END,
        ]
    )


def release_rows(contents: LedgerContents) -> dict[str, str]:
    """The noise of a ledger's releases, rounded up, and how units got into them, by name."""
    return {NOISE: noise_text(contents), "sampling": _sampling(contents)}


def _sampling(contents: LedgerContents) -> str:
    """The law by which units got into batches, with its numbers."""
    rates, bands = sorted({release.sample_rate for release in contents.composition}), _bands(contents)
    coins = f" by a secret coin of {_range([f'{rate:.6g}' for rate in rates])}"
    each = f"at each of {contents.releases} steps each unit"
    sampler = next((release.sampler for release in contents.composition), POISSON)
    if sampler.name == "balls_in_bins":
        return (
            f"balls in bins: in each epoch of {sampler.batches} steps each unit in one batch, by a secret choice of "
            f"its own; {contents.releases} steps"
        )
    if sampler.name == "truncated_poisson":
        return f"truncated Poisson: {each}{coins}; of more than {sampler.max_batch} units so many, at random"
    return f"Poisson: {each}{f' of one of {bands} groups in turn' if bands else ''}{coins}"


def not_covered(contents: LedgerContents, certificate: SearchCertificate | None, *, classifies: bool) -> list[str]:
    """Sentences on what the guarantee does not cover; the first says why, where no epsilon is certified."""
    header = contents.header
    kind = "adapters" if form_of(header.train) is LORA else "weights"
    found = [
        "The weights of the base model, and what it was trained on.",
        _FIGURES if header.telemetry == "research" else "The number of training units, and how long the run took.",
        f"Other {kind} from the same records: their epsilons add up.",
        "Choosing settings by looking at the private records.",
    ]
    if certificate is not None:
        held_out = ", and that of the held-out units that score" if certificate.score.on == "held_out" else ""
        found[1:2] = [
            f"The number of training units{held_out}: public by assumption.",
            "How many candidates there were and what became of them, which is secret; how long the search took.",
        ]
        found[-1] = "Choosing outside this search, or its space by looking at the records."
        found.append("A record that crashes a run: the guarantee assumes that none can.")
    if classifies:
        found.insert(2, _LABELS)
    if not has_guarantee(certified_epsilon(contents, certificate)):
        leaks = contents.epsilons.leaks if certificate is None else certificate.all_leaks
        found.insert(0, f"{EVERYTHING}{why_not(leaks)}.")
    plugins = header.plugins if certificate is None else certificate.plugins
    return [*found, *(f"Mistakes in {plugin}, which dptune cannot check." for plugin in plugins)]


def certified_epsilon(contents: LedgerContents, certificate: SearchCertificate | None) -> float:
    """The epsilon that covers a deliverable: its ledger's, and for the winner of a search the whole search's."""
    return contents.epsilons.certified if certificate is None else certificate.certified


def guarantee_rows(contents: LedgerContents, certificate: SearchCertificate | None) -> dict[str, str]:
    """What is guaranteed, to whom, and by which mechanism, by name. Epsilons and delta are rounded up."""
    header, prices = contents.header, contents.epsilons
    neighbours, dealt_by = _NEIGHBOURS, _dealt_by(contents, certificate)
    if "rank" in dealt_by:
        neighbours += (
            ", whose number stays empty; groups were dealt by rank, so nothing is certified where others move up"
        )
    elif dealt_by:
        neighbours += ", each dealt into a group by its own key, so that all others keep their groups"
    published = _claim(contents)
    if certificate is not None:
        published = "infinity (the mechanism's paper counts no search)"
    elif not all(release.sampler.claimed for release in contents.composition):
        published = "not defined (the mechanism's paper gives none for this sampler)"
    whose = (
        "one record"
        if header.unit == "record"
        else f"one unit `{header.unit}`: all records that share a value of that column"
    )
    return {
        "epsilon_certified": f"{_up(certified_epsilon(contents, certificate))} ({_proved(certificate)})",
        "epsilon_noise_only": f"{_up(_noise_only(contents, certificate))} ({GLOSSES['epsilon_noise_only']})",
        "epsilon_published": published,
        "epsilon_audited": _AUDITED_BY_COINS if header.canaries else _AUDITED,
        DELTA: at_most(header.delta, _DIGITS_OF_DELTA),
        **({} if certificate is None else _searched(certificate, prices.published)),
        "unit": whose,
        "neighbours": neighbours,
        "units": f"{header.units} in training: public, and covered by no epsilon",
        **({"canaries": _beside(header)} if header.canaries else {}),
        "mechanism": header.mechanism,
        **({} if header.train == "lora" else {TRAINED: f"{header.train}{_IN_FLOAT32}"}),
    }


def _beside(header: RunHeader) -> str:
    return (
        f"trained beside {header.canaries} gradients of an auditor, which count among the units; commitment to their "
        f"coins: SHA-256 {header.coins}"
    )


def _claim(contents: LedgerContents) -> str:
    """The published epsilon and the accountant that counts it. Plain DP-SGD also has the one by Renyi DP."""
    header, prices = contents.header, contents.epsilons
    if math.isinf(prices.published):
        return _up(prices.published)
    claim = f"{_up(prices.published)}, by {CLAIMED_BY[header.published_accountant]}"
    counted = contents.composition + composition_of(header.inherited)
    renyi = renyi_claim(prices, header.published_accountant, counted, header.delta)
    return claim if renyi is None else f"{claim}; {_up(renyi)} by Renyi DP"


def claim_of_earlier(contents: LedgerContents) -> dict[str, str]:
    """The row of the claim as earlier versions wrote it: for Poisson batches always, and not saying who counts."""
    as_poisson: Composition = Counter()
    for release, count in contents.composition.items():
        as_poisson[replace(release, sampler=POISSON)] += count
    claim = published_epsilon(contents.header.published_accountant, as_poisson, contents.header.delta)
    return {"epsilon_published": f"{_up(claim)} (as the mechanism's paper counts)"}


def rows_of_ranks(contents: LedgerContents, certificate: SearchCertificate | None) -> dict[str, str]:
    """The rows that an earlier version wrote otherwise, where it dealt units into groups by rank; empty elsewhere."""
    if "rank" not in _dealt_by(contents, certificate):
        return {}
    return {
        "epsilon_certified": f"{_up(_noise_only(contents, certificate))} ({_proved(certificate)})",
        "neighbours": f"{_NEIGHBOURS}, whose number stays empty, so that all others keep their groups",
    }


def _dealt_by(contents: LedgerContents, certificate: SearchCertificate | None) -> set[str]:
    """What decided the groups of units; empty for independent noise."""
    # The price of a search also covers the candidates that lost, so their noise counts here as well.
    of_search = certificate.kinds if certificate is not None else ()
    charged = [*contents.composition, *(release for _, kind in of_search for release, _ in kind)]
    return {release.dealt_by for release in charged if release.coefficients}


def _noise_only(contents: LedgerContents, certificate: SearchCertificate | None) -> float:
    return contents.epsilons.noise_only if certificate is None else certificate.epsilon_by(certificate.bound)


def _proved(certificate: SearchCertificate | None) -> str:
    return GLOSSES["epsilon_certified"] + ("" if certificate is None else ", of the whole search")


def table(rows: Mapping[str, str]) -> list[str]:
    """Lines of a table of two columns, in which nothing can leave its cell."""
    return ["| | |", "| --- | --- |", *(f"| {cell(name)} | {cell(value)} |" for name, value in rows.items())]


def _searched(certificate: SearchCertificate, published: float) -> dict[str, str]:
    """The rows of the card about a search; ``published`` is the winner's own, as if it had been trained alone."""
    law, winner = certificate.law, certificate.winner
    return {
        "search": f"{certificate.id}: the best of a random number of candidates, {law.uncapped_mean:.4g} on average",
        "law of the number": f"shape {law.to_dict()['shape']}, rate {law.rate:.6g}, at most {law.most}",
        "bound": certificate.bound,
        SCORE: score_text(certificate),
        "epsilon_of_one_candidate": f"{_up(certificate.one_candidate)} (no guarantee: this one was chosen)",
        "epsilon_published_of_one_candidate": f"{_up(published)} (no guarantee: this one was chosen)",
        **({} if winner is None else {"winner's score": f"{winner.score:.6g}"}),
    }


def _up(epsilon: float) -> str:
    """Four digits, rounded up: a card never promises more than the ledger."""
    if not math.isfinite(epsilon):
        return "infinity"
    return f"{float(Context(prec=_DIGITS, rounding=ROUND_CEILING).create_decimal(repr(epsilon))):g}"


def noise_text(contents: LedgerContents, *, nearest: bool = False) -> str:
    """The noise of a ledger's releases: rounded up, for whoever types it; ``nearest`` as in earlier versions."""
    bands = _bands(contents)
    noises = sorted({release.effective_noise_multiplier for release in contents.composition})
    shown = [f"{noise:.6g}" if nearest else at_most(noise, _DIGITS_OF_NOISE) for noise in noises]
    return f"{_range(shown)} times the sensitivity" + (f", correlated over {bands} steps" if bands else "")


def score_text(certificate: SearchCertificate, *, nearest: bool = False) -> str:
    """What scored the candidates, with its noise: rounded up; ``nearest`` as in earlier versions."""
    score = certificate.score
    if score.on == "public":
        return f"public records ({score.units})"
    noise = f"{score.noise_multiplier:.4g}" if nearest else at_most(score.noise_multiplier, _DIGITS)
    clipped = f"each clipped to {score.clip:g} nats, noise {noise} times that over their number"
    return f"{score.units} units ({score.on}), {clipped}"


def _bands(contents: LedgerContents) -> int:
    """Steps over which noise is correlated; 0 for independent noise."""
    return max((len(release.coefficients) for release in contents.composition), default=0)


def _range(shown: list[str]) -> str:
    return (shown[0] if len(shown) == 1 else f"{shown[0]} to {shown[-1]}") if shown else "none"
