"""Writes the page on a search: what was searched, its winner, and the price of choosing. Of other candidates, nothing.

It is made of what ``tasks.search.run`` kept and of the public certificate, so it holds nothing that must stay secret.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dptune.core.digits import at_most
from dptune.core.files import read_json
from dptune.job.search.space import Domain, Range, Space
from dptune.privacy.certificate import FILE, SearchCertificate, read_certificate
from dptune.privacy.run_folder import FOLDER, RunFolder, said_within
from tasks.charts.canvas import save
from tasks.charts.search import WAY_LOOKS, choosing, ranking
from tasks.report.numbers import digits4
from tasks.report.page import write

PAGE, PICTURE, RANKING = "search.html", "choosing.png", "ranking.png"
#: The records that figures are about, by their key, in the order in which the first one opens the page.
RECORDS = {"held_out": "held-out private records", "public": "public records"}
Results = Mapping[str, Any]
_LAWS = {"uniform": "uniform", "log_uniform": "uniform in the logarithm"}
_SCORED = {
    "held_out": "loss of {units} held-out units",
    "train": "loss of the {units} training units",
    "public": "loss of {units} public records",
}


@dataclass(frozen=True)
class SearchedSetting:
    """A row of the space: a setting, what it was drawn from, and the winner's value; empty if it is another table's."""

    name: str
    values: str
    winner: str


@dataclass(frozen=True)
class CountingRow:
    """A row of the price of choosing.

    Attributes:
        dearer: the noise over that of a single run, such as "+12.5 %"; empty for the single run itself.
    """

    name: str
    note: str
    epsilon: float
    noise: float | None
    dearer: str
    certified: bool


def write_page(folder: Path, directory: Path) -> str:
    """Write search.html on the finished search in ``folder``. Returns the sentence that answers first.

    Raises: DptuneError for a certificate that was edited.
    """
    results: Results = read_json(RunFolder(folder).results)
    proof = proof_of(folder, results)
    certificate = None if results["rehearsed"] else read_certificate(proof)
    figures = []
    for picture in (PICTURE, RANKING):
        (directory / picture).unlink(missing_ok=True)
    if (prices := results["prices"]) is not None:
        figures.append(choosing(prices["curve"], results["expected"], results["epsilon"]))
        save(figures[0], directory / PICTURE)
    if "ranking" in results:
        chosen = _named(winner_of(results, certificate))
        figures.append(ranking(ranked(results), chosen, synthetic=results["synthetic"]))
        save(figures[-1], directory / RANKING)
    opening = answer(results)
    write(
        "search.html.j2",
        directory / PAGE,
        figures,
        WAY_LOOKS,
        results=results,
        opening=[opening],
        folder=folder.as_posix(),
        released=released(results),
        proof=proof.as_posix(),
        certified=float(results["epsilon_certified"]),
        records=RECORDS,
        held_out="held_out" in results["perplexity"] or "held_out" in results["scores"],
        space=searched(results["space"], winner_of(results, certificate)),
        countings=countings(results),
        law=None if certificate is None else law_text(certificate),
        score=None if certificate is None or not released(results) else score_text(results),
        tried=tried(results),
        carried=_unranked_text(folder) if unranked(folder) else ranking_text(results) if "ranking" in results else [],
        on=rehearsed_on(results),
    )
    return opening


def answer(results: Results) -> str:
    """The sentence that opens the page, and MLflow's description of the run."""
    certified = at_most(results["epsilon_certified"])
    if not released(results):
        cost = f"and the budget is spent all the same: certified ε = {certified} for the whole search"
        why = failure(results)
        return f"{why[0].upper()}{why[1:]}, so the base model is the result: nothing was released, {cost}."
    mechanism = results["settings"]["mechanism"]
    if results["rehearsed"]:
        how = f"the best of {len(results['tried'])} settings that were rehearsed on {rehearsed_on(results)}"
        return f"At certified ε = {certified}, `{mechanism}` is {how}{_figure_text(results)}."
    how = f"the best of a secret number of candidates, {results['expected']:g} on average"
    return f"At certified ε = {certified} for the whole search, `{mechanism}` is {how}{_figure_text(results)}."


def failure(results: Results) -> str:
    """Why an ended search has no result, as a clause."""
    if results["rehearsed"]:
        return f"the private run diverged at the settings that were rehearsed on {rehearsed_on(results)}"
    return "every candidate failed"


def failure_of(folder: Path) -> str | None:
    """Why the ended search in ``folder`` released nothing, as a clause; None if it released a winner."""
    results: Results = read_json(RunFolder(folder).results)
    return None if released(results) else failure(results)


def unranked(folder: Path) -> bool:
    """Whether the check of a rehearsal's ranking has begun in ``folder``, beside its winner, and has not ended."""
    results = RunFolder(folder).results
    if not ((folder / FOLDER).is_dir() and results.exists()):
        return False
    return "ranking" not in read_json(results)


def proof_of(folder: Path, results: Results) -> Path:
    """What prices an ended search: its certificate, or the ledger of a rehearsal's one run."""
    place = RunFolder(folder).adapter if released(results) else folder
    return RunFolder(place).ledger if results["rehearsed"] else place / FILE


def released(results: Results) -> bool:
    """Whether there is a winner; results of earlier versions all have one."""
    return bool(results.get("released", True))


def rehearsed_on(results: Results) -> str:
    """What the records of a rehearsal are called; those of earlier versions were all public records."""
    return str(results.get("rehearsed_on", RECORDS["public"]))


def _figure_text(results: Results) -> str:
    """A clause with one figure of the winner: perplexity on held-out records where telemetry allows it, else the noisy
    score on them, else a figure on public records.
    """
    if (
        "held_out" not in results["perplexity"]
        and "held_out" not in results["scores"]
        and results["score"]["on"] == "held_out"
    ):
        score = results["score"]
        much = f"{abs(score['value']):.3f} ± {score['deviation']:.3f} {_nats(results)}"
        where = "below" if score["value"] >= 0 else "above"
        return (
            f": its loss on held-out records is {much} {where} the base model's, by a score that the guarantee covers"
        )
    for key, records in RECORDS.items():
        if (pair := results["perplexity"].get(key)) is not None:
            return f": perplexity {digits4(pair[0])} → {digits4(pair[1])} on {records}"
        if (scores := results["scores"].get(key)) is not None:
            return f": accuracy {100 * scores['accuracy'][1]:.1f} % on {records}"
    return ""


def _nats(results: Results) -> str:
    """What losses are measured in: a classifier's are of whole records."""
    return "nats a record" if results["settings"].get("task") == "classify" else "nats a token"


def winner_of(results: Results, certificate: SearchCertificate | None) -> Mapping[str, Any]:
    """The winner's configuration."""
    if certificate is not None:
        return {} if certificate.winner is None else certificate.winner.options
    return dict(min(results["tried"], key=lambda one: float(one[1]))[0])


def searched(space: Sequence[Mapping[str, Any]], winner: Mapping[str, Any]) -> list[tuple[str, list[SearchedSetting]]]:
    """Title and rows of each table of the space; of several tables, the titles tell their chances."""
    found = Space.of(list(space))
    return [
        (
            f"with chance {100 * table.weight:.3g} %" if len(found.tables) > 1 else "",
            [
                SearchedSetting(name, _domain_text(domain), _winners(table.domains, name, winner))
                for name, domain in table.domains.items()
            ],
        )
        for table in found.tables
    ]


def _domain_text(domain: Domain) -> str:
    if isinstance(domain, Range):
        return f"{domain.low:g} to {domain.high:g}, {_LAWS[domain.law]}"
    return ", ".join(map(_value_text, domain))


def _winners(domains: Mapping[str, Domain], name: str, winner: Mapping[str, Any]) -> str:
    return _value_text(winner[name]) if set(domains) == set(winner) else ""


def _value_text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def countings(results: Results) -> list[CountingRow]:
    """The ways to count, from the one that ignores the choice to the dearest."""
    if results["prices"] is None:
        return []
    found = {one["way"]: one for one in results["prices"]["countings"]}
    single = found["single"]["noise_multiplier"]
    words = {
        "single": ("one run: the choice ignored", "no guarantee for a winner"),
        "search": ("best of a random number: this search", "certified"),
        "one_shift": (
            "the same, by one shift of the profile",
            "Koskela, Redberg and Wang 2024",
        ),
        "renyi": ("the same, by Rényi DP", "Papernot and Steinke 2022"),
        "composed": (f"{found['composed']['runs']} runs composed", "naive; all of them could be shown"),
        "capped": (f"{found['capped']['runs']} runs composed", "naive, for the largest possible number"),
    }
    return [
        CountingRow(
            *words[way],
            float(one["epsilon"]),
            one["noise_multiplier"],
            _dearer(one["noise_multiplier"], single) if way != "single" else "",
            way == "search",
        )
        for way, one in ((way, found[way]) for way in words)
    ]


def _dearer(noise: float | None, single: float | None) -> str:
    return "" if noise is None or single is None else f"{100 * (noise / single - 1):+.1f} %"


def law_text(certificate: SearchCertificate) -> str:
    """The public law of the secret number of candidates."""
    law = certificate.law
    names = {0.0: "logarithmic", 1.0: "geometric", math.inf: "Poisson"}
    shape = names.get(law.shape, f"negative binomial of shape {law.shape:g}")
    tenth, fifth = (f"{100 * law.hit(share):.0f} %" for share in (0.1, 0.2))
    return (
        f"Their number was drawn once from a public law ({shape}, mean {law.uncapped_mean:g}, at most {law.most}) and "
        f"is secret. With chance {tenth} one of the best tenth of the space was tried at all, with chance {fifth} "
        "one of the best fifth."
    )


def score_text(results: Results) -> str:
    """What candidates were compared by, and the winner's score with its noise."""
    score = results["score"]
    what = _SCORED[score["on"]].format(units=score["units"])
    if score["on"] == "public":
        return f"Candidates were compared by the {what}."
    return (
        f"Candidates were compared by the {what}, against the base model, each unit's difference clipped to "
        f"{score['clip']:g} nats, with noise that the guarantee covers. The winner's score: {score['value']:+.4f} ± "
        f"{score['deviation']:.4f} {_nats(results)} (one standard deviation of that noise; the best of several is a "
        "little flattered by it)."
    )


def tried(results: Results) -> list[tuple[str, float]]:
    """Every setting that a rehearsal tried on public records, the best first."""
    found = [(_named(options), float(perplexity)) for options, perplexity in results.get("tried", [])]
    return sorted(found, key=lambda one: one[1])


def _named(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_value_text(value)}" for name, value in options.items())


def ranked(results: Results) -> list[tuple[str, float, float]]:
    """Every setting that was run on the private records too: its perplexities in the rehearsal and on held-out ones."""
    return [
        (_named(options), float(rehearsed), float(held_out))
        for options, rehearsed, held_out in results["ranking"]["points"]
    ]


def _unranked_text(folder: Path) -> list[str]:
    """What the page says meanwhile, with what the runs of the check have spent so far."""
    known = "The check of the ranking has not ended, so its result is not shown."
    return [f"{known} The chosen setting's own run costs the epsilon above{said_within(folder)}."]


def ranking_text(results: Results) -> list[str]:
    """How well a rehearsal's ranking carries over, and what it cost to know."""
    ranking, points = results["ranking"], ranked(results)
    worst = sum(math.isinf(rehearsed) or math.isinf(held_out) for _, rehearsed, held_out in points)
    but = f", of which {worst} diverged and {'rank' if worst > 1 else 'ranks'} last" if worst else ""
    over = f"over {len(points)} settings{but}"
    if ranking["correlation"] is None:
        first = f"There is no rank correlation {over}: it takes three, and perplexities that differ."
    else:
        first = (
            f"Rank correlation (Spearman) of perplexities in the rehearsal, on {rehearsed_on(results)}, with the "
            f"perplexities of held-out private records: {ranking['correlation']:.2f}, {over}. 1 is the same "
            f"order, 0 is chance."
        )
    settings = len(points) - 1
    again = f", in {ranking['runs']} runs with those that were set aside" if ranking["runs"] > settings else ""
    cost = (
        f"For this, {settings} settings beside the chosen one were run on the private records too{again}, which cost "
        f"certified ε = {at_most(ranking['epsilon'])} at δ = {at_most(ranking['delta'])} together, without runs whose "
        "folders were removed. That adds to what the chosen one cost; the register counts each of them. No "
        "guarantee covers perplexities of held-out private records."
    )
    return [first, cost]
