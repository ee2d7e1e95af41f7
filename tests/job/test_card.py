"""A card says what its ledger says, in words that a label or a column's name cannot break."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptune.core.digits import at_most
from dptune.core.files import write_text
from dptune.job.delivery import verification
from dptune.job.delivery.card import card_text
from dptune.job.delivery.privacy_section import END, START, claim_of_earlier, privacy_section, score_text
from dptune.job.delivery.verification import CARD, CONFIG, WEIGHTS, CardError, check_deliverable, section_of
from dptune.job.result import RunResult
from dptune.privacy.accountants import gdp_clt_epsilon, rdp_epsilon
from dptune.privacy.certificate import SearchCertificate
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import LedgerContents, read_ledger
from dptune.privacy.release import Release
from dptune.privacy.run_header import RunHeader
from dptune.privacy.samplers.sampler import Sampler


def section(noise: float = 1.0, steps: int = 10, **header: str) -> tuple[LedgerContents, str]:
    values = {"unit": "customer_id", "data": "complaints", **header}
    about = RunHeader("static", "gdp_clt", "certified", None, 1e-6, units=1000, **values)  # type: ignore[arg-type]
    contents = LedgerContents(about, Counter({Release(0.05, noise): steps}), steps, "0" * 64, True)
    return contents, privacy_section(contents, {"ledger.jsonl": "1" * 64, "adapter_model.safetensors": "2" * 64})


@given(noise=st.floats(0.5, 20), steps=st.integers(1, 50))
def test_a_card_promises_no_less_than_the_ledger(noise: float, steps: int) -> None:
    contents, text = section(noise, steps)
    (line,) = (line for line in text.splitlines() if line.startswith("| epsilon_certified"))
    said = float(line.split()[3])
    assert contents.epsilons.certified <= said <= contents.epsilons.certified * 1.002


@given(label=st.text(max_size=40), unit=st.text(min_size=1, max_size=40))
def test_a_label_stays_in_its_cell(label: str, unit: str) -> None:
    _, plain = section()
    _, text = section(data=label, unit=unit)
    assert text.count(START) == text.count(END) == 1
    assert len(text.splitlines()) == len(plain.splitlines())
    assert all(line.count("|") in (0, 3) for line in text.splitlines())


def test_telemetry_decides_what_is_said_of_figures_that_the_owner_saw() -> None:
    assert "- Figures of private records, which the owner was shown: they are left" in section(telemetry="research")[1]
    assert "igures" not in section(telemetry="private")[1]


@pytest.mark.parametrize("scored", [False, True])
def test_a_card_tells_figures_of_public_records_alone(scored: bool) -> None:
    measures = ("accuracy", "f1", "calibration_error", "loss", "largest_class") if scored else ("perplexity",)
    before, after = ({f"eval_{name}": value for name in measures} for value in (9.25, 8.25))
    result = RunResult(before, after, base="gpt2", task="classify" if scored else "generate")
    told = card_text("", result, 1.0)
    assert "Not shown: figures come only from public records, and none were given." in told
    assert not [word for word in ("9.25", "8.25", "held-out", "private") if word in told]
    before.update({f"public_{name}": 7.5 for name in measures})
    after.update({f"public_{name}": 6.5 for name in measures})
    told = card_text("", result, 1.0)
    assert f"- public records: {'accuracy ' if scored else ''}7.5 before, 6.5 after" in told
    assert not [word for word in ("9.25", "8.25", "held-out", "private") if word in told]


def test_delta_and_noise_are_rounded_up_and_cards_of_earlier_versions_stay_true(tmp_path: Path) -> None:
    """They have them to the nearest, and nobody may be told that a card which a run delivered lies."""
    header = RunHeader("static", "gdp_clt", "certified", None, 1 / 3e6, "record", 10)
    with Ledger.create(tmp_path / "ledger.jsonl", header, Counter()) as ledger:
        ledger.charge(Release(1.0, 4.0000012))
        ledger.finish()
    for name in (WEIGHTS, CONFIG):
        write_text(tmp_path / name, "a stand-in")
    now, epsilon = section_of(tmp_path)
    assert epsilon == read_ledger(tmp_path / "ledger.jsonl").epsilons.certified
    assert "| delta | 3.33334e-07 |" in now
    assert "| noise | 4.00001 times the sensitivity |" in now
    for delta, noise, lie in (
        ("3.33334e-07", "4.00001", ""),
        ("3.33334e-07", "4", ""),
        ("3.33333e-07", "4", ""),
        ("3.33332e-07", "4", "delta"),
        ("3.33333e-07", "4.00002", "noise"),
    ):
        earlier = now.replace("3.33334e-07", delta).replace("4.00001 times", f"{noise} times")
        write_text(tmp_path / CARD, earlier)
        with pytest.raises(CardError, match=rf"says '\| {lie} ") if lie else nullcontext():
            check_deliverable(tmp_path)
    write_text(tmp_path / CARD, now.replace("| | |\n", "", 1))
    with pytest.raises(CardError):
        check_deliverable(tmp_path)


@pytest.mark.parametrize("mechanism", ["static", "banded"])
def test_the_claim_names_its_accountant_and_cards_of_earlier_versions_stay_true(mechanism: str, tmp_path: Path) -> None:
    """The card of a plain DP-SGD run has two claims, because the report of a study shows the one by Renyi DP."""
    accountant = "gdp_clt" if mechanism == "static" else "bandmf"
    header = RunHeader(mechanism, accountant, "certified", None, 1e-5, "record", 100)
    with Ledger.create(tmp_path / "ledger.jsonl", header, Counter()) as ledger:
        for _ in range(10):
            ledger.charge(Release(0.1, 1.1))
        ledger.finish()
    for name in (WEIGHTS, CONFIG):
        write_text(tmp_path / name, "a stand-in")
    now, _ = section_of(tmp_path)
    (row,) = (line for line in now.splitlines() if line.startswith("| epsilon_published"))
    contents = read_ledger(tmp_path / "ledger.jsonl")
    claim = at_most(contents.epsilons.published, 4)
    if mechanism == "static":
        renyi = at_most(rdp_epsilon(contents.composition, 1e-5), 4)
        assert row == f"| epsilon_published | {claim}, by central limit (no bound); {renyi} by Renyi DP |"
        assert float(claim) < float(renyi)
    else:
        assert row == f"| epsilon_published | {claim}, by loss distribution, as epsilon_certified |"
    earlier = f"| epsilon_published | {claim} (as the mechanism's paper counts) |"
    for said, lie in ((row, False), (earlier, False), (earlier.replace(claim, "0.01"), True)):
        write_text(tmp_path / CARD, now.replace(row, said))
        with pytest.raises(CardError, match="do not trust it") if lie else nullcontext():
            check_deliverable(tmp_path)


def test_the_claim_of_earlier_versions_counts_every_release() -> None:
    about = RunHeader("static", "gdp_clt", "certified", None, 1e-5, "record", 100)
    every = Sampler("full")
    releases = Counter({Release(1.0, 5.0): 10, Release(1.0, 5.0, sampler=every): 1})
    found = claim_of_earlier(LedgerContents(about, releases, 11, "0" * 64, True))
    claim = at_most(gdp_clt_epsilon(Counter({Release(1.0, 5.0): 11}), 1e-5), 4)
    assert found == {"epsilon_published": f"{claim} (as the mechanism's paper counts)"}


def test_what_scored_a_search_has_its_noise_rounded_up_and_that_of_earlier_versions_is_known() -> None:
    score = SimpleNamespace(on="held_out", units=20, clip=2.0, noise_multiplier=3.00001)
    certificate = cast(SearchCertificate, SimpleNamespace(score=score, kinds=()))
    assert score_text(certificate) == (
        "20 units (held_out), each clipped to 2 nats, noise 3.001 times that over their number"
    )
    contents, _ = section()
    rows = verification._rows_of_earlier(contents, certificate)
    assert rows["score"] == (
        "| score | 20 units (held_out), each clipped to 2 nats, noise 3 times that over their number |"
    )


@pytest.mark.parametrize(
    "heading",
    [
        *("## Privacy", "# PRIVACY ##", "> ###### **privacy**", "## 5. Pri\N{ZERO WIDTH SPACE}vacy:", "#Privacy"),
        *("Privacy\n=======", "Privacy\n---", '<h2 id="x">\nPriva<b>cy</b></h2>', "## [Privacy](#privacy)"),
    ],
)
@pytest.mark.parametrize("before", [True, False])
def test_a_second_section_of_the_name_is_refused(heading: str, before: bool, tmp_path: Path) -> None:
    """Only one is compared, and a reader would believe the other."""
    with Ledger.create(
        tmp_path / "ledger.jsonl", RunHeader("static", "gdp_clt", "certified", None, 1e-5, "record", 10), Counter()
    ) as ledger:
        ledger.charge(Release(1.0, 4.0))
        ledger.finish()
    for name in (WEIGHTS, CONFIG):
        write_text(tmp_path / name, "a stand-in")
    own, said = section_of(tmp_path)[0], f"{heading}\n\nThe epsilon is 0.1."
    harmless = "---\ntags:\n- privacy\n---\n\n# Model\n\nPrivacy matters.\n\n## Privacy of others\n\n"
    write_text(tmp_path / CARD, f"{harmless}{own}\n\n## Training\n")
    check_deliverable(tmp_path)
    write_text(tmp_path / CARD, f"{said}\n\n{own}\n" if before else f"{harmless}{own}\n\n{said}\n")
    with pytest.raises(CardError, match=r"has another heading named Privacy .*\. Fix: rename it"):
        check_deliverable(tmp_path)
