"""Runs and searches that an earlier version began, with groups dealt by rank: they go on, and certify nothing."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_search import asked
from tiny_search import prepared as prepared_search
from tiny_tuning import QUICK, checkpoint, rows
from typer.testing import CliRunner

from dptune import tune
from dptune.cli import app
from dptune.job import run
from dptune.job.delivery import verification
from dptune.job.delivery.card import SENTENCE
from dptune.job.delivery.privacy_section import END, START
from dptune.job.delivery.verification import CARD, CardError, check_deliverable, consistent_certificate, section_of
from dptune.job.run import Tuned
from dptune.job.search.candidates import SearchRun, prepared_candidate
from dptune.job.search.plan import Journal, Plan
from dptune.job.search.search import certificate_of, plan_of_search
from dptune.privacy.certificate import SearchCertificate
from dptune.privacy.entropy import OsEntropy
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import LedgerError, read_ledger
from dptune.privacy.release import DEALT_BY_RANK, Release
from dptune.privacy.run_header import RunHeader
from dptune.privacy.spent_budgets.register import Register
from dptune.training import run_start
from dptune.training.privacy_units import PrivacyUnits, Turn

BANDS, STOPS = 3, 4


def tuned(folder: Path, **changes: Any) -> Tuned:
    given = {"epsilon": 8.0, "delta": 1e-3, "telemetry": "private", "mechanism": "banded"} | QUICK
    records = changes.pop("records", rows(40))
    return tune(str(checkpoint()), records, out=folder / "out", options={"bands": BANDS}, **(given | changes))


def begun_by_an_earlier_version(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of which it made four steps: by rank, with no word about it in ledger or cell. Returns its folder."""
    with monkeypatch.context() as patch:
        train = run.train
        for module in (run_start, run):
            patch.setattr(module, "as_charged", lambda mechanism, _: replace(mechanism, dealt_by="rank"))

        def stopped(spec: Any, out: Path, entropy: Any, _: Any, **given: Any) -> Any:
            def on_step(report: Any) -> None:
                if report.releases == STOPS:
                    raise KeyboardInterrupt

            return train(spec, out, entropy, on_step, **given)

        patch.setattr(run, "train", stopped)
        with pytest.raises(KeyboardInterrupt):
            tuned(folder)
    out = folder / "out"
    cell = json.loads((out / "cell.json").read_text())
    del cell["keys"]
    (out / "cell.json").write_text(json.dumps(cell))
    assert "dealt_by" not in (out / "ledger.jsonl").read_text()
    return out


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Turn | None, int]]:
    """The turn and the number of every unit that a run draws."""
    found: list[tuple[Turn | None, int]] = []
    draw = PrivacyUnits.draw

    def noted(units: PrivacyUnits, rate: float, entropy: Any, turn: Turn | None = None) -> Any:
        batch = draw(units, rate, entropy, turn)
        found.extend((turn, int(record)) for (record,) in batch)
        return batch

    monkeypatch.setattr(PrivacyUnits, "draw", noted)
    return found


def test_a_run_goes_on_by_ranks_and_certifies_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    drawn: list[tuple[Turn | None, int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    out = begun_by_an_earlier_version(tmp_path, monkeypatch)
    drawn.clear()
    with caplog.at_level(logging.WARNING):
        found = tuned(tmp_path)
    assert "goes on as it was begun: units dealt into groups by their rank" in caplog.text
    assert drawn
    for turn, number in drawn:  # every record is a unit, and its number is its rank
        assert turn is not None
        assert turn.dealt_by == "rank"
        assert turn.holds(np.array([number]))
    assert "dealt_by" not in (out / "ledger.jsonl").read_text()
    assert math.isinf(found.epsilons.certified)
    assert found.epsilons.leaks == (DEALT_BY_RANK,)
    assert 7.9 < found.epsilons.noise_only <= 8
    assert "| epsilon_certified | infinity (what is proved) |" in (out / "adapter" / CARD).read_text()
    assert math.isinf(Register(tmp_path / "spent.jsonl").totals()[0].epsilon)
    said = CliRunner().invoke(app, ["verify", str(out)]).stdout
    assert f"Not certified: {DEALT_BY_RANK}." in said


def test_a_run_that_goes_on_has_the_same_keys_from_then_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier version digested records alone, not their keys; ids move keys and no token."""
    out = begun_by_an_earlier_version(tmp_path, monkeypatch)

    def stopped(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, "train", stopped)
        with pytest.raises(KeyboardInterrupt):
            tuned(tmp_path)
    assert "keys" in json.loads((out / "cell.json").read_text())
    with pytest.raises(Exception, match=r"started with other settings \(keys\)"):
        tuned(tmp_path, records=[row | {"number": place} for place, row in enumerate(rows(40))], id="number")


def as_earlier(card: Path, certified: str) -> None:
    """The card's rows as the version wrote them that dealt by rank."""
    rows_of = {
        "epsilon_certified": f"{certified} (what is proved)",
        "neighbours": "data sets of which one lacks a unit of the other (add or remove), whose number stays empty, so "
        "that all others keep their groups",
    }
    lines = card.read_text().split("\n")
    named = [line.split("|")[1].strip() if line.startswith("|") else "" for line in lines]
    written = [
        f"| {name} | {rows_of[name]} |" if name in rows_of else line for name, line in zip(named, lines, strict=True)
    ]
    card.write_text("\n".join(written))


def test_a_card_of_an_earlier_version_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = begun_by_an_earlier_version(tmp_path, monkeypatch)
    found = tuned(tmp_path)
    card = out / "adapter" / CARD
    as_earlier(card, "8")
    assert check_deliverable(out / "adapter").epsilons == found.epsilons
    as_earlier(card, "7")
    with pytest.raises(CardError, match="epsilon_certified"):
        check_deliverable(out / "adapter")


def test_ranks_excuse_no_claim_of_a_card_beside_another_leak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = begun_by_an_earlier_version(tmp_path, monkeypatch) / "adapter"
    contents = tuned(tmp_path).ledger
    for leaks in ((), ("a fixed noise seed",)):
        other = replace(contents, header=replace(contents.header, accounting="published", leaks=leaks))
        monkeypatch.setattr(verification, "read_ledger", lambda path, other=other: other)
        text = (folder / CARD).read_text()
        head, tail = text[: text.index(START)], text[text.index(END) + len(END) :]
        (folder / CARD).write_text(f"{head}{section_of(folder)[0]}{tail}\n{SENTENCE}\n")
        if not leaks:
            check_deliverable(folder)
            continue
        with pytest.raises(CardError, match=r"its ledger certifies no epsilon \(.*a fixed noise seed"):
            check_deliverable(folder)


def test_a_card_of_a_run_by_keys_may_not_speak_of_an_empty_number(tmp_path: Path) -> None:
    found = tuned(tmp_path)
    assert found.epsilons.certified == found.epsilons.noise_only <= 8
    card = tmp_path / "out" / "adapter" / CARD
    assert "each dealt into a group by its own key, so that all others keep their groups" in card.read_text()
    as_earlier(card, "8")
    with pytest.raises(CardError, match="neighbours"):
        check_deliverable(tmp_path / "out" / "adapter")


def test_rows_by_key_never_follow_rows_by_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit that changes its group could be drawn once more than is charged."""
    path = begun_by_an_earlier_version(tmp_path, monkeypatch) / "ledger.jsonl"
    contents = read_ledger(path)
    assert contents.last is not None
    following = replace(contents.last, part=STOPS % BANDS)
    with Ledger.resume(path, contents.composition) as ledger:
        with pytest.raises(LedgerError, match="differs in dealt_by from the row before"):
            ledger.charge(replace(following, dealt_by="key"))
        ledger.charge(following)


def test_ranks_excuse_no_other_leak() -> None:
    """A certified budget refuses the rest as ever, and a run without ranks has no excuse at all."""
    header = RunHeader("banded", "bandmf", "certified", 8.0, 1e-3, "record", 40)
    row = Release(0.2, 2.0, part=0, coefficients=(0.8, 0.6), dealt_by="rank")
    assert math.isinf(header.price(Counter([row])).certified)
    assert header.within_budget(Counter([row]))
    assert not header.within_budget(Counter({row: 10**4}))
    assert not header.within_budget(Counter([replace(row, raw_inputs=("a raw norm",))]))


def earlier_certificate(change: Callable[[dict[str, Any]], None] = lambda data: None) -> tuple[Any, SearchCertificate]:
    """The plan's own parts and the certificate of a search over banded kinds, as an earlier version wrote it."""
    settings, own = (
        asked(space={"learning_rate": [0.01, 0.02]}, bound="one_shift"),
        prepared_search(mechanism="banded", options={"bands": 2}),
    )
    kinds, terms = plan_of_search(own, settings)
    data = certificate_of(own, settings, kinds, terms, "id", "0" * 64).to_dict()
    change(data)
    for _, releases in data["kinds"]:
        for release, _count in releases:
            assert release.pop("dealt_by") == "key"
    return (own, settings, kinds, terms), SearchCertificate.from_dict(data)


def test_a_search_of_an_earlier_version_goes_on_by_ranks_and_certifies_nothing(tmp_path: Path) -> None:
    (own, settings, kinds, terms), found = earlier_certificate()
    assert math.isinf(found.certified)
    assert found.all_leaks == (DEALT_BY_RANK,)
    assert found.epsilon_by(found.bound) <= found.epsilon == 8
    plan = Plan.draw(settings, kinds, OsEntropy())
    shared = SearchRun(own, plan, terms, tmp_path, Journal.create(tmp_path, plan.id), None, None, None, found.kinds)
    for candidate in plan.candidates:
        mechanism = prepared_candidate(shared, candidate).mechanism.mechanism
        assert mechanism.release(mechanism.knobs(), 0.1).dealt_by == "rank"
    fresh = replace(shared, kinds=tuple((kind.weight, tuple(kind.releases.items())) for kind in kinds))
    mechanism = prepared_candidate(fresh, plan.candidates[0]).mechanism.mechanism
    assert mechanism.release(mechanism.knobs(), 0.1).dealt_by == "key"


def test_a_certificate_of_an_earlier_version_verifies_within_what_it_was_for(tmp_path: Path) -> None:
    from dptune.privacy.certificate import write_certificate

    for name, epsilon in (("kept", 8.0), ("broken", 7.0)):
        _, found = earlier_certificate(lambda data, epsilon=epsilon: data.update(epsilon=epsilon))
        write_certificate(tmp_path / name, found)
    assert math.isinf(consistent_certificate(tmp_path / "kept").certified)
    kept = (tmp_path / "kept").rename(tmp_path / "certificate.jsonl")
    for path in (kept, tmp_path):
        said = CliRunner().invoke(app, ["verify", str(path)])
        assert said.exit_code == 1, "it agrees, and certifies nothing"
        assert "NO GUARANTEE: no epsilon is certified (units dealt into groups by their rank" in said.output
        assert CliRunner().invoke(app, ["verify", str(path), "--no-guarantee"]).exit_code == 0
    with pytest.raises(CardError, match=r"costs 7\.\d+, and was to keep within 7"):
        consistent_certificate(tmp_path / "broken")


@pytest.mark.parametrize("said", ["rank", "row", "", None, 3])
def test_a_row_says_key_or_nothing(said: Any) -> None:
    data = Release(0.2, 1.0, part=0, coefficients=(0.8, 0.6)).to_dict()
    assert data["dealt_by"] == "key"
    with pytest.raises(Exception, match="dealt_by"):
        Release.from_dict(data | {"dealt_by": said})
    with pytest.raises(Exception, match="dealt_by"):
        Release.from_dict(Release(0.2, 1.0).to_dict() | {"dealt_by": "key"})
