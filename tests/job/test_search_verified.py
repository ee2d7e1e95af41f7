"""A delivered winner whose certificate was written anew is refused wherever it contradicts itself or what lies beside.

Every case seals the certificate and writes the card again, as somebody would who has the code.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_search import draws, start
from typer.testing import CliRunner, Result

from dptune.cli import app
from dptune.core.digits import at_most
from dptune.core.errors import ConfigError, DivergedError
from dptune.job.delivery import verification
from dptune.job.delivery.finished_adapter import open_adapter
from dptune.job.delivery.privacy_section import END, START, privacy_section
from dptune.job.delivery.synthetic_card import synthetic_card
from dptune.job.delivery.verification import CardError, certificate_of, check_deliverable, section_of
from dptune.job.run import Tuned
from dptune.job.search.search import NoWinnerError
from dptune.privacy.certificate import FILE, SCORE_LEDGER, ScoreTerms
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import LedgerError, encode, read_ledger, seal
from dptune.training import run as training_run

Line = dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    with pytest.MonkeyPatch.context() as patched:
        draws(patched, 1)
        return start(tmp_path_factory.mktemp("verified"), space={"expected_batch_size": [4, 8]}, candidates=2)


def lines_of(folder: Path) -> list[Line]:
    read = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "chain"} for line in read]


def sealed(folder: Path, lines: list[Line]) -> None:
    """Write certificate and card again."""
    chain, content = "0" * 64, b""
    for line in lines:
        raw, chain = seal(encode(line), chain)
        content += raw
    (folder / FILE).write_bytes(content)
    text = (folder / "README.md").read_text()
    written = text[: text.index(START)] + section_of(folder)[0] + text[text.index(END) + len(END) :]
    (folder / "README.md").write_text(written)


@pytest.fixture
def copy(found: Tuned, tmp_path: Path) -> Path:
    return Path(shutil.copytree(found.folder / "adapter", tmp_path / "adapter"))


def kinds(change: Callable[[float], float]) -> Callable[[Line], Line]:
    return lambda line: {"kinds": [[change(weight), held] for weight, held in line["kinds"]]}


FIRST: dict[str, Callable[[Line], Line]] = {
    "other weights": lambda line: {"kinds": [[0.001, line["kinds"][0][1]], [0.999, line["kinds"][1][1]]]},
    "weights that do not add up": kinds(lambda weight: weight / 2),
    "more kinds than the space": lambda line: {"kinds": [*line["kinds"], line["kinds"][0]]},
    "fewer kinds than the space": lambda line: {"kinds": [[1.0, line["kinds"][1][1]]]},
    "a larger space": lambda line: {"space": [{"weight": 1.0, "expected_batch_size": [4, 8, 16]}]},
    "no space": lambda line: {"space": [{"weight": 1.0, "batch": {"uniform": [1, 2]}}]},
    "a score that is public": lambda line: {
        "score": {"on": "public", "clip": 0.0, "noise_multiplier": 0.0, "units": 6}
    },
    "more noise of the score": lambda line: {"score": line["score"] | {"noise_multiplier": 500.0}},
    "more units that score": lambda line: {"score": line["score"] | {"units": 10**9}},
    "units that are a text": lambda line: {"score": line["score"] | {"units": "x"}},
    "a budget below the price": lambda line: {"epsilon": 1.0},
    "other telemetry": lambda line: {"telemetry": "research"},
    "unknown telemetry": lambda line: {"telemetry": 7},
    "no commitment": lambda line: {"commitment": ""},
    "another search": lambda line: {"id": "other"},
    "another number of units": lambda line: {"units": line["units"] + 1},
    "fewer releases": lambda line: {
        "kinds": [
            [weight, [[release, count - 1] for release, count in held if count > 1]] for weight, held in line["kinds"]
        ]
    },
    "an identity that is a number": lambda line: {"id": 7},
}
SECOND: dict[str, Line] = {
    "a score that is a text": {"score": "good"},
    "no score": {"score": None},
    "options that are none": {"options": 3},
    "another ledger": {"ledger_chain": "0" * 64},
    "other weights": {"adapter_sha256": "0" * 64},
    "a digest that is a number": {"ledger_chain": 7},
}


def test_what_was_delivered_is_accepted(copy: Path) -> None:
    sealed(copy, lines_of(copy))
    check_deliverable(copy)


@pytest.mark.parametrize("case", FIRST)
def test_a_first_line_that_contradicts_is_refused(case: str, copy: Path) -> None:
    first, second = lines_of(copy)
    with pytest.raises((CardError, LedgerError)):
        sealed(copy, [first | FIRST[case](first), second])


@pytest.mark.parametrize("case", SECOND)
def test_a_winner_that_contradicts_is_refused(case: str, copy: Path) -> None:
    first, second = lines_of(copy)
    with pytest.raises((CardError, LedgerError)):
        sealed(copy, [first, second | SECOND[case]])


def test_a_winner_of_a_cheaper_kind_is_refused(copy: Path) -> None:
    first, second = lines_of(copy)
    other = 8 if second["options"]["expected_batch_size"] == 4 else 4
    with pytest.raises(CardError, match="released more"):
        sealed(copy, [first, second | {"options": {"expected_batch_size": other}}])


def test_a_winner_outside_the_space_is_refused(copy: Path) -> None:
    first, second = lines_of(copy)
    for options in ({"expected_batch_size": 5}, {"expected_batch_size": 4, "epochs": 1}, {}):
        with pytest.raises(CardError, match="not a point of its space"):
            sealed(copy, [first, second | {"options": options}])


def test_a_winner_made_by_code_that_the_certificate_does_not_name_is_refused(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = read_ledger(copy / "ledger.jsonl")
    other = replace(contents, header=replace(contents.header, plugins=("mine",)))
    monkeypatch.setattr(verification, "read_ledger", lambda path: other)
    with pytest.raises(CardError, match="belongs to another search"):
        verification.certificate_of(copy)


def resealed(path: Path, lines: list[Line]) -> str:
    """Write a ledger again, with the right checksums; returns its chain."""
    chain, content = "0" * 64, b""
    for line in lines:
        raw, chain = seal(encode({name: value for name, value in line.items() if name != "chain"}), chain)
        content += raw
    path.write_bytes(content)
    return chain


@pytest.mark.parametrize("ledger", ["ledger.jsonl", SCORE_LEDGER])
@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ("leak", "names a leak"),
        ("inherited", "builds on another run's releases"),
        ("no end", "has no end"),
    ],
)
def test_a_ledger_of_a_search_says_nothing_that_the_certificate_does_not_price(
    ledger: str, says: str, reason: str, copy: Path
) -> None:
    """The certificate prices the releases of a kind alone: all else in a ledger would be free."""
    path, (first, second) = copy / ledger, lines_of(copy)
    header, *others = [json.loads(line) for line in path.read_text().splitlines()]
    if says == "leak":
        header |= {"leaks": ["a fixed noise seed"], "accounting": "published"}
    elif says == "inherited":
        charge = {name: value for name, value in others[0].items() if name not in ("kind", "step", "chain")}
        header["inherited"] = [[charge, 5]]
    else:
        others.pop()
    chain = resealed(path, [header, *others])
    winner = second | ({"ledger_chain": chain} if ledger == "ledger.jsonl" else {})
    with pytest.raises(CardError, match=reason):
        sealed(copy, [first, winner])


def test_a_card_names_the_plug_ins_of_its_run_or_of_all_candidates(found: Tuned) -> None:
    contents, certificate = found.ledger, found.certificate
    assert certificate is not None
    own = replace(contents, header=replace(contents.header, plugins=("mine 1.0",)))
    searched = replace(certificate, plugins=("mine 1.0", "a loser's 2.0"))
    for text, names in (
        (privacy_section(contents, {}, certificate=certificate), []),
        (privacy_section(own, {}), ["mine 1.0"]),
        (privacy_section(own, {}, certificate=searched), ["mine 1.0", "a loser's 2.0"]),
    ):
        assert re.findall("- Mistakes in (.*), which dptune cannot check", text) == names


@pytest.mark.parametrize(
    "change", [{"delta": 0.01}, {"unit": "record"}, {"data": "of others"}, {"units": 10**6}, {"telemetry": "research"}]
)
def test_a_certificate_of_another_search_is_refused_though_the_score_says_the_same(change: Line, copy: Path) -> None:
    """At another delta, say, the search would cost less than it does."""
    first, second = lines_of(copy)
    header, *others = [json.loads(line) for line in (copy / SCORE_LEDGER).read_text().splitlines()]
    scored = {name: value for name, value in change.items() if name != "units"}  # those are the units that score
    resealed(copy / SCORE_LEDGER, [header | scored, *others])
    assert first | change != first
    with pytest.raises(CardError, match="belongs to another search than the ledger"):
        sealed(copy, [first | change, second])


def test_texts_of_a_winner_rest_on_the_code_of_the_losers_too_and_say_why_nothing_is_certified(found: Tuned) -> None:
    adapter = open_adapter(found.folder / "adapter")
    assert adapter.certificate is not None
    assert (adapter.leaks, adapter.plugins) == ((), ())
    for change, said in (
        ({"plugins": ("mine 1.0",)}, "Mistakes in mine 1.0,"),
        ({"leaks": ("a seed",)}, "for: a seed."),
    ):
        other = replace(adapter, certificate=replace(adapter.certificate, **change))
        card = synthetic_card(other, "some.jsonl", "0" * 64, settings={}, figures={}, prompts="", notes=())
        assert said in card
    with pytest.raises(ConfigError, match=r"no certified epsilon \(a seed\)"):
        other.check_guarantee()


def test_the_ledger_of_the_score_is_there_whole_and_of_this_search(copy: Path) -> None:
    path, lines = copy / SCORE_LEDGER, lines_of(copy)
    whole, contents = path.read_bytes(), read_ledger(path)
    terms = ScoreTerms(**lines[0]["score"])
    assert terms.release is not None
    for content in (b"garbage\n", b"".join(whole.splitlines(keepends=True)[:-1])):
        path.write_bytes(content)
        with pytest.raises((CardError, LedgerError)):
            sealed(copy, lines)
    less_noise = replace(terms.release, noise_multiplier=terms.noise_multiplier / 2)
    for header, releases in (
        (replace(contents.header, search="other"), [terms.release]),
        (replace(contents.header, units=contents.header.units + 1), [terms.release]),
        (replace(contents.header, data="of others"), [terms.release]),
        (contents.header, [terms.release, terms.release]),
        (contents.header, [less_noise]),
    ):
        path.unlink()
        with Ledger.create(path, header, Counter(releases)) as ledger:
            for release in releases:
                ledger.charge(release)
            ledger.finish()
        with pytest.raises(CardError, match="does not charge the score"):
            sealed(copy, lines)
    path.unlink()
    with pytest.raises(LedgerError):
        sealed(copy, lines)
    with Ledger.create(path, replace(contents.header, run_id="another"), Counter([terms.release])) as ledger:
        ledger.charge(terms.release)
        ledger.finish()
    with pytest.raises(
        CardError, match=r"score\.jsonl: is not the file that"
    ):  # as good, but not the one that the card names
        check_deliverable(copy)


def test_the_epsilons_of_a_search_are_the_same_everywhere(found: Tuned) -> None:
    folder, certificate = found.folder / "adapter", found.certificate
    assert certificate is not None
    said = json.loads(CliRunner().invoke(app, ["verify", str(folder), "--json"]).stdout)
    alone = json.loads(CliRunner().invoke(app, ["verify", str(folder / FILE), "--json"]).stdout)
    words = " ".join(CliRunner().invoke(app, ["verify", str(folder)]).stdout.split())
    assert "it takes the best of a random number of candidates" in words
    assert "{" not in words, "the winner's settings were printed as a dictionary"
    own = found.ledger.epsilons
    for shown in (said, alone):
        assert shown["epsilon_certified"] == pytest.approx(certificate.certified)
        assert shown["epsilon_noise_only"] == pytest.approx(certificate.epsilon_by("hull"))
        assert float(shown["epsilon_published"]) == math.inf
    assert said["epsilon_published_of_one_candidate_no_guarantee"] == pytest.approx(own.published)
    assert not [name for name in said if name.startswith("epsilon_published_by")], "no paper counts a search"
    assert found.epsilons.certified == found.epsilons.noise_only == certificate.certified > own.noise_only
    assert found.epsilons.published == math.inf
    card = (folder / "README.md").read_text()
    rows = dict(line.strip("| ").split(" | ", 1) for line in card.splitlines() if line.startswith("| epsilon"))
    assert float(rows["epsilon_noise_only"].split()[0]) >= certificate.certified > own.noise_only * 1.01
    assert rows["epsilon_published"].startswith("infinity")
    assert "held-out units that score" in card
    assert "Perplexity on held-out private records" not in card


def test_a_search_without_a_winner_is_verified_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draws(monkeypatch, 1)

    def fail(run: Any) -> None:
        raise DivergedError("the run diverged.")

    monkeypatch.setattr(training_run.Run, "end", fail)
    with pytest.raises(NoWinnerError):
        start(tmp_path)
    for path in (tmp_path / "out", tmp_path / "out" / FILE):
        said = CliRunner().invoke(app, ["verify", str(path)])
        assert said.exit_code == 0
        assert "Every candidate failed" in said.stdout


# Exports of a winner.


def exported(folder: Path, form: str) -> Result:
    return CliRunner().invoke(app, ["export", str(folder), "--format", form])


def test_an_export_of_a_winner_says_the_epsilon_of_the_whole_search(copy: Path) -> None:
    whole = certificate_of(copy)
    assert whole is not None
    assert math.isinf(read_ledger(copy / "ledger.jsonl").epsilons.certified), "by itself a winner has no guarantee"
    entry = json.loads(exported(copy, "registry").stdout)["deployment"]
    assert entry["privacy_loss"]["privacy_parameters"]["epsilon"] == pytest.approx(whole.certified, rel=1e-3)
    assert entry["privacy_loss"]["privacy_parameters"]["epsilon"] >= whole.certified
    assert "Epsilon is of all candidates of the search" in entry["implementation"]["composition"]
    assert (
        f"| epsilon_certified | {at_most(whole.certified, 4)} (what is proved, of the whole"
        in exported(copy, "nist").stdout
    )


def test_a_folder_that_does_not_verify_is_not_exported(copy: Path) -> None:
    card = copy / "README.md"
    card.write_text(card.read_text().replace("| mechanism | static", "| mechanism | another"))
    assert exported(copy, "nist").exit_code == 2
