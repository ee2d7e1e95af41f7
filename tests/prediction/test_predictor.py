"""The protocol with memory: T tokens and no more, whatever dies in between, and the law that is promised."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from scipy import stats
from tiny_ensemble import PROTOCOL, base, build
from tiny_models import CPU
from typer.testing import CliRunner

from dptune.cli import app
from dptune.cli.answer_commands import TOKEN_VARIABLE
from dptune.core.errors import ConfigError
from dptune.prediction import deployment as deployment_module
from dptune.prediction.deployment import MOST_CHARACTERS, Deployment, deploy, has_answered, open_ledger
from dptune.prediction.ensemble import load_adapters, read_manifest, write_manifest
from dptune.prediction.mixture import law, token_at, truncate_laws
from dptune.prediction.predictor import PrivatePredictor, next_log_probabilities, weights_of
from dptune.prediction.protocols import FixedMixture
from dptune.prediction.service import create_app
from dptune.privacy.budget_gate import BudgetError
from dptune.privacy.entropy import FixedSeed, OsEntropy
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import LedgerError, read_ledger
from dptune.training.gradients.stacked_adapters import PUBLIC
from dptune.training.models.model import load_base

TOKENS = int(PROTOCOL["tokens"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("ensembles") / "whole")


@pytest.fixture
def ensemble(whole: Path, tmp_path: Path) -> Path:
    """A copy that has not answered yet."""
    return Path(shutil.copytree(whole, tmp_path / "an ensemble"))


def _spend(deployment: Deployment, tokens: int) -> list[int]:
    given = [deployment.predictor.answer([5]).token for _ in range(tokens)]
    deployment.predictor.close()
    return given


def test_answers_end_with_the_budget(ensemble: Path) -> None:
    deployment = deploy(ensemble, CPU)
    for count in range(1, TOKENS + 1):
        answer = deployment.predictor.answer([5, 6])
        assert answer.tokens_left == TOKENS - count
        assert (answer.unit, answer.delta) == ("shard", 1e-5)
        assert 0 < answer.epsilon_spent <= 8
    assert answer.epsilon_spent == pytest.approx(8, abs=1e-9)
    for _ in range(2):
        with pytest.raises(BudgetError, match=f"all {TOKENS} tokens are spent"):
            deployment.predictor.answer([5])
    contents = read_ledger(ensemble / "ledger.jsonl")
    assert (contents.releases, contents.complete) == (TOKENS, True)
    assert contents.epsilons.certified == pytest.approx(8, abs=1e-9)
    assert contents.epsilons.certified <= 8
    again = deploy(ensemble, CPU)
    with pytest.raises(BudgetError):
        again.predictor.answer([5])


def test_a_restart_continues_where_the_ledger_is(ensemble: Path) -> None:
    _spend(deploy(ensemble, CPU), 5)
    deployment = deploy(ensemble, CPU)
    assert deployment.budget["tokens_left"] == TOKENS - 5
    _spend(deployment, TOKENS - 5)
    with pytest.raises(BudgetError):
        deploy(ensemble, CPU).predictor.answer([5])


def test_a_process_that_died_before_its_last_line_is_spent_too(ensemble: Path) -> None:
    _spend(deploy(ensemble, CPU), TOKENS)
    lines = (ensemble / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (ensemble / "ledger.jsonl").write_bytes(b"".join(lines[:-1]))
    with pytest.raises(BudgetError):
        deploy(ensemble, CPU).predictor.answer([5])
    assert read_ledger(ensemble / "ledger.jsonl").complete


def test_a_lost_or_swapped_ledger_is_no_fresh_budget(ensemble: Path, whole: Path, tmp_path: Path) -> None:
    _spend(deploy(ensemble, CPU), 3)
    (ensemble / "ledger.jsonl").rename(tmp_path / "kept")
    with pytest.raises(LedgerError, match="is gone, but this ensemble has answered"):
        deploy(ensemble, CPU)
    other = Path(shutil.copytree(whole, tmp_path / "other"))
    _spend(deploy(other, CPU), 1)
    shutil.copy(other / "ledger.jsonl", ensemble / "ledger.jsonl")
    with pytest.raises(LedgerError, match="is not the ledger that this ensemble answered from"):
        deploy(ensemble, CPU)
    shutil.copy(tmp_path / "kept", ensemble / "ledger.jsonl")
    assert deploy(ensemble, CPU).budget["tokens_left"] == TOKENS - 3


@pytest.mark.parametrize("kept", [1, 3, 5])  # the last is one token short
def test_an_older_copy_of_the_ledger_is_no_fresh_budget(ensemble: Path, kept: int) -> None:
    """The chain cannot see that its last lines are missing; the note beside it does."""
    _spend(deploy(ensemble, CPU), 5)
    lines = (ensemble / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (ensemble / "ledger.jsonl").write_bytes(b"".join(lines[:kept]))
    with pytest.raises(LedgerError, match=f"it holds {kept - 1} tokens, and 5 were answered"):
        deploy(ensemble, CPU)
    (ensemble / "ledger.jsonl").write_bytes(b"".join(lines))
    (ensemble / "served.json").write_text("{")
    with pytest.raises(LedgerError, match="is damaged"):
        deploy(ensemble, CPU)
    with pytest.raises(LedgerError, match="is damaged"):  # and no lock was left behind
        deploy(ensemble, CPU)


@pytest.mark.parametrize("kept", [1, 3, None])
def test_a_ledger_without_its_note_is_refused_whatever_it_holds(ensemble: Path, kept: int | None) -> None:
    """The note is written before the ledger is made, so no crash leaves a ledger alone: somebody took the note away."""
    _spend(deploy(ensemble, CPU), 5)
    lines = (ensemble / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (ensemble / "ledger.jsonl").write_bytes(b"".join(lines[:kept]))
    (ensemble / "served.json").unlink()
    for _ in range(2):  # and no lock was left behind
        with pytest.raises(LedgerError, match=r"served\.json: is missing.*restore it") as refused:
            deploy(ensemble, CPU)
        assert not re.search(r"\b(remove|delete)\b", str(refused.value))
    assert not (ensemble / "served.json").exists()


def test_a_process_that_died_while_it_started_has_spent_nothing(
    ensemble: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the note; after an empty or torn ledger; after the ledger's first line. All T tokens are left."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "create", killed)
        with pytest.raises(KeyboardInterrupt):
            deploy(ensemble, CPU)
    assert (ensemble / "served.json").exists()
    assert not (ensemble / "ledger.jsonl").exists()
    for torn in (b"", b'{"accounting":"cert'):
        (ensemble / "ledger.jsonl").write_bytes(torn)
        deployment = deploy(ensemble, CPU)
        assert deployment.predictor.tokens_spent == 0
        deployment.predictor.close()
        (ensemble / "ledger.jsonl").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(deployment_module, "_note", killed)
        with pytest.raises(KeyboardInterrupt):
            deploy(ensemble, CPU)
    assert json.loads((ensemble / "served.json").read_text())["chain"] is None
    assert len(_spend(deploy(ensemble, CPU), TOKENS)) == TOKENS


def test_a_charge_that_its_note_does_not_know_counts(ensemble: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk between the charge and its note: the token is lost, not given, and never given again."""
    deployment = deploy(ensemble, CPU)
    deployment.predictor.answer([5])
    real = deployment_module.write_json

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(deployment_module, "write_json", full)
    with pytest.raises(LedgerError, match=r"served\.json: cannot be written \(No space left.*charged but was not"):
        deployment.predictor.answer([5])
    monkeypatch.setattr(deployment_module, "write_json", real)
    deployment.predictor.close()
    assert deploy(ensemble, CPU).budget["tokens_left"] == TOKENS - 2


def test_a_read_only_folder_is_named(ensemble: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(ensemble / "served.json"))

    monkeypatch.setattr(deployment_module, "write_json", refused)
    with pytest.raises(LedgerError, match=r"Permission denied.*served\.json.*make the folder writable"):
        deploy(ensemble, CPU)


def test_two_processes_that_start_at_once_agree_on_one_ledger(ensemble: Path) -> None:
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            try:
                manifest = read_manifest(ensemble)
                held = open_ledger(ensemble, manifest, FixedMixture(**manifest.protocol), OsEntropy())
                os._exit(0 if held else 1)
            except LedgerError:
                os._exit(2)
        children.append(child)
    ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert 0 in ended
    assert set(ended) <= {0, 2}
    assert len(_spend(deploy(ensemble, CPU), TOKENS)) == TOKENS


@pytest.mark.parametrize("missing", ["epsilon", "delta", "alpha", "tokens", "models", "public_weight", "unit", None])
def test_nobody_is_served_by_defaults(ensemble: Path, missing: str | None) -> None:
    """An ensemble that was tuned to be scored has no protocol; it once answered by 1,024 tokens at epsilon 8."""
    manifest = read_manifest(ensemble)
    protocol = {} if missing is None else {key: value for key, value in manifest.protocol.items() if key != missing}
    write_manifest(ensemble, replace(manifest, protocol=protocol))
    with pytest.raises(
        ConfigError, match=f"cannot answer: no budget was set for its answers .no .*{missing or 'epsilon'}"
    ):
        deploy(ensemble, CPU)
    assert not has_answered(ensemble)


def test_slots_that_disagree_leave_no_ledger(ensemble: Path) -> None:
    manifest = read_manifest(ensemble)
    write_manifest(ensemble, replace(manifest, protocol=manifest.protocol | {"models": 5}))
    with pytest.raises(ConfigError, match="has 3 slots, and its protocol 5"):
        deploy(ensemble, CPU)
    assert not has_answered(ensemble)


@pytest.mark.parametrize("telemetry", ["research", "private"])
def test_the_ledger_of_answers_carries_the_experiments_telemetry(ensemble: Path, telemetry: str) -> None:
    write_manifest(ensemble, replace(read_manifest(ensemble), telemetry=telemetry))
    _spend(deploy(ensemble, CPU), 1)
    assert read_ledger(ensemble / "ledger.jsonl").header.telemetry == telemetry
    _spend(deploy(ensemble, CPU), 1)
    write_manifest(ensemble, replace(read_manifest(ensemble), telemetry="other"))
    with pytest.raises(LedgerError, match=r"other settings \(telemetry\)"):
        deploy(ensemble, CPU)


def test_a_forked_process_cannot_answer(ensemble: Path) -> None:
    deployment = deploy(ensemble, CPU)
    deployment.predictor.answer([5])
    child = os.fork()
    if child == 0:
        try:
            deployment.predictor.answer([5])
        except LedgerError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert deployment.predictor.answer([5]).tokens_left == TOKENS - 2
    with (ensemble / "ledger.jsonl").open("ab") as file:
        file.write(b"x")
    with pytest.raises(LedgerError, match="changed by another process"):
        deployment.predictor.answer([5])


def test_a_token_that_no_draw_gives_is_no_proof() -> None:
    """A private model cannot say what the public one says less often than 2^-40: the token would betray it."""
    public = torch.tensor([[0.5, 0.5, 1e-14]], dtype=torch.float64).log()
    private = torch.tensor([[[0.25, 0.25, 0.5]], [[1e-13, 1e-13, 1.0]], [[0.0, 0.0, 1.0]]], dtype=torch.float64).log()
    whole, kept = truncate_laws(public, private)
    assert whole[0].exp().tolist() == [0.5, 0.5, 0.0]
    assert kept[0, 0].exp().tolist() == pytest.approx([0.5, 0.5, 0.0])
    assert kept[1, 0].exp().tolist() == pytest.approx([0.5, 0.5, 0.0])
    assert torch.equal(kept[2], whole)  # nothing is left of it


def test_two_processes_cannot_answer_from_one_ledger(ensemble: Path) -> None:
    first = deploy(ensemble, CPU)
    with pytest.raises(LedgerError, match="another process"):
        deploy(ensemble, CPU)
    first.predictor.close()
    deploy(ensemble, CPU).predictor.close()


@pytest.mark.parametrize(
    "change", [{"epsilon": 9.0}, {"tokens": 13}, {"alpha": 4}, {"delta": 1e-6}, {"unit": "record"}]
)
def test_another_protocol_is_refused_once_one_has_answered(ensemble: Path, change: dict[str, Any]) -> None:
    _spend(deploy(ensemble, CPU), 1)
    manifest = json.loads((ensemble / "ensemble.json").read_text())
    manifest["protocol"] |= change
    (ensemble / "ensemble.json").write_text(json.dumps(manifest))
    with pytest.raises(LedgerError, match="other settings"):
        deploy(ensemble, CPU)


def test_a_patient_is_protected_only_where_shards_go_by_patient(ensemble: Path) -> None:
    manifest = json.loads((ensemble / "ensemble.json").read_text())
    manifest["protocol"]["unit"] = "patient"
    (ensemble / "ensemble.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match="a patient is in many shards"):
        deploy(ensemble, CPU)
    (ensemble / "ensemble.json").write_text(json.dumps(manifest | {"key": "patient"}))
    with pytest.raises(ConfigError, match="holds records by record, the ensemble says by patient"):
        deploy(ensemble, CPU)
    for shard in ensemble.glob("shard-*/shard.json"):
        shard.write_text(json.dumps(json.loads(shard.read_text()) | {"key": "patient"}))
    assert deploy(ensemble, CPU).predictor.answer([5]).unit == "patient"


def test_a_fixed_seed_is_refused(ensemble: Path) -> None:
    with pytest.raises(ConfigError, match="fixed seed"):
        deploy(ensemble, CPU, FixedSeed(0))
    assert not (ensemble / "ledger.jsonl").exists()


def test_slots_and_protocol_must_agree(ensemble: Path) -> None:
    manifest = read_manifest(ensemble)
    model = load_base(base(), CPU)
    adapters = load_adapters(ensemble, manifest, model, CPU)
    with pytest.raises(ConfigError, match="3 slots, the protocol 5"):
        PrivatePredictor(model, adapters, FixedMixture(models=5), None, OsEntropy())


def test_an_empty_prompt_costs_nothing(ensemble: Path) -> None:
    deployment = deploy(ensemble, CPU)
    with pytest.raises(ConfigError, match="prompt"):
        deployment.predictor.answer([])
    assert deployment.predictor.tokens_spent == 0


@pytest.mark.parametrize("unit", ["shard", "record"])
def test_tokens_follow_the_whole_law(ensemble: Path, unit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chi-square of 20,000 two-stage draws against the law that is scored; false alarm 1e-6."""
    protocol = FixedMixture(tokens=20, models=3, public_weight=0.3, unit=unit)
    model = load_base(base(), CPU)
    adapters = load_adapters(ensemble, read_manifest(ensemble), model, CPU)
    predictor = PrivatePredictor(model, adapters, protocol, None, OsEntropy())
    generator = torch.Generator().manual_seed(0)
    laws = torch.log_softmax(1.5 * torch.randn(4, 12, generator=generator, dtype=torch.float64), -1)
    weights = weights_of(protocol, laws[:1], laws[1:, None])
    assert 0 < float(weights.min()) < 1
    expected = law(laws[:1], laws[1:, None], weights, protocol.slots)[0].numpy()
    public = laws[0].exp().numpy()
    assert 20_000 * ((expected - public) ** 2 / public).sum() > 100  # what the private models add would be seen

    def rows_of(_model: Any, _adapters: Any, _context: Any, rows: list[int]) -> torch.Tensor:
        return laws[[row + 1 for row in rows]]  # PUBLIC is -1

    def known(_protocol: Any, _public: Any, private: torch.Tensor, *, steady: bool) -> torch.Tensor:
        assert steady
        return weights[[int((laws[1:] - private[0, 0]).abs().sum(dim=-1).argmin())]]  # equal to rounding

    monkeypatch.setattr("dptune.prediction.predictor.next_log_probabilities", rows_of)
    monkeypatch.setattr("dptune.prediction.predictor.weights_of", known)
    counts = np.bincount([predictor._draw([5, 6]) for _ in range(20_000)], minlength=len(expected))
    assert stats.chisquare(counts, expected * 20_000 / expected.sum()).pvalue > 1e-6


def test_the_draw_inverts_the_cumulative_sum() -> None:
    law_of_four = torch.tensor([0.0, 0.25, 0.0, 0.75], dtype=torch.float64)
    assert [token_at(law_of_four, place) for place in (1e-16, 0.2499, 0.2501, 1 - 1e-16)] == [1, 1, 3, 3]


def test_every_pass_costs_the_same_rows(ensemble: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever slot or branch: one pass of two rows, the public one first."""
    import dptune.prediction.predictor as predictor

    seen = []
    real = next_log_probabilities

    def spy(model: Any, adapters: Any, context: Any, rows: list[int]) -> torch.Tensor:
        seen.append(rows)
        return real(model, adapters, context, rows)

    monkeypatch.setattr(predictor, "next_log_probabilities", spy)
    _spend(deploy(ensemble, CPU), TOKENS)
    assert len(seen) == TOKENS
    assert all(len(rows) == 2 and rows[0] == PUBLIC and rows[1] in range(3) for rows in seen)


def test_a_long_context_is_cut_to_what_the_model_sees(ensemble: Path) -> None:
    assert deploy(ensemble, CPU).predictor.answer(list(range(200))).tokens_left == TOKENS - 1


def test_many_threads_never_overspend(ensemble: Path) -> None:
    deployment = deploy(ensemble, CPU)
    given, refused = [], []

    def client() -> None:
        for _ in range(4):
            try:
                given.append(deployment.predictor.answer([7]).tokens_left)
            except BudgetError:
                refused.append(1)

    threads = [threading.Thread(target=client) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(given) == list(range(TOKENS))
    assert len(refused) == 32 - TOKENS
    assert read_ledger(ensemble / "ledger.jsonl").releases == TOKENS


def test_generate_stops_at_the_end_of_text_and_at_what_was_asked(ensemble: Path) -> None:
    deployment = deploy(ensemble, CPU)
    assert len(list(deployment.predictor.generate([5], 4))) == 4
    given: list[int] = []
    end = deployment.predictor.answer([5]).token  # likely enough to come again
    with suppress(BudgetError):
        given += [answer.token for answer in deployment.predictor.generate([5], 50, end)]
    assert end not in given[:-1]


def test_the_command_answers_and_then_refuses(ensemble: Path) -> None:
    arguments = ["generate", "the old", "--ensemble", str(ensemble), "--tokens", "5"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["tokens_left"] == TOKENS - len(found["answered"])
    assert found["unit"] == "shard"
    assert "SYNTHETIC" in found["data"]
    told = CliRunner().invoke(app, arguments)
    assert f"of {TOKENS} tokens left" in told.stderr
    assert "for one shard" in told.stderr
    left = json.loads(CliRunner().invoke(app, [*arguments[:-1], "1", "--json"]).stdout)["tokens_left"]
    many = CliRunner().invoke(app, [*arguments[:-1], "1000"])
    assert many.exit_code == 2
    assert many.stderr.strip() == (
        f"error: --tokens: 1000 are requested, and only {left} of {TOKENS} are left, for good. "
        f"Fix: use --tokens {left} to spend all of them, or fewer."
    )
    verified = json.loads(CliRunner().invoke(app, ["verify", str(ensemble / "ledger.jsonl"), "--json"]).stdout)
    assert verified["steps"] == TOKENS - left  # nothing was spent
    for _ in range(TOKENS):
        last = CliRunner().invoke(app, [*arguments[:-1], "1"])
    assert last.exit_code == 2
    assert "tokens are spent" in last.stderr
    verified = json.loads(CliRunner().invoke(app, ["verify", str(ensemble / "ledger.jsonl"), "--json"]).stdout)
    assert (verified["steps"], verified["unit"], verified["complete"]) == (TOKENS, "shard", True)
    assert verified["epsilon_certified"] == pytest.approx(8, abs=1e-9)


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_commands_name_what_is_missing(tmp_path: Path, command: str) -> None:
    result = CliRunner().invoke(app, [command, "--ensemble", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert "holds no whole ensemble" in result.stderr
    bad = CliRunner().invoke(app, [command, "--device", "toaster"])
    assert bad.exit_code == 2
    assert "toaster" in bad.stderr


def _client(ensemble: Path, **options: Any) -> TestClient:
    return TestClient(create_app(deploy(ensemble, CPU), **options), base_url="http://localhost")


def test_the_service_answers_until_the_budget_ends(ensemble: Path) -> None:
    client = _client(ensemble)
    assert client.get("/budget").json()["tokens_left"] == TOKENS
    reply = client.post("/generate", json={"prompt": "the old", "tokens": 2}).json()
    assert reply["tokens_left"] == TOKENS - len(reply["answered"])
    assert (reply["unit"], reply["stopped"]) == ("shard", None)
    answered = len(reply["answered"])
    while answered < TOKENS:
        reply = client.post("/generate", json={"prompt": "the", "tokens": 1000}).json()
        answered += len(reply["answered"])
    assert answered == TOKENS
    refused = client.post("/generate", json={"prompt": "the"})
    assert refused.status_code == 403
    assert "tokens are spent" in refused.json()["detail"]
    budget = client.get("/budget").json()
    assert budget["tokens_left"] == 0
    assert budget["epsilon_spent"] == pytest.approx(8, abs=1e-9)
    assert "/generate" in client.get("/openapi.json").json()["paths"]
    assert client.get("/docs").status_code == 200


@pytest.mark.parametrize("body", [{"tokens": 0}, {"tokens": 10_000}, {"prompt": 3}, {"tokens": "x"}, {"promt": "x"},
                                  {"tokens": True}, {"tokens": "3"}, {"tokens": 1.5}])  # fmt: skip
def test_the_service_refuses_bad_questions(ensemble: Path, body: dict[str, Any]) -> None:
    client = _client(ensemble)
    assert client.post("/generate", json=body).status_code == 422
    assert client.get("/budget").json()["tokens_left"] == TOKENS


def test_a_token_that_the_model_does_not_have_costs_nothing(ensemble: Path) -> None:
    predictor = deploy(ensemble, CPU).predictor
    for context in ([5, 10**6], [-1]):
        with pytest.raises(ConfigError, match=r"prompt: holds a token that the model has no embedding for"):
            predictor.answer(context)
    assert predictor.tokens_spent == 0
    predictor.close()


def test_the_budget_counts_what_was_spent_before_it_was_set_aside(ensemble: Path) -> None:
    deployment = deploy(ensemble, CPU)
    _spend(deployment, 2)
    kept = Path(shutil.copytree(ensemble, ensemble.with_name(f"{ensemble.name}.set-aside-1")))
    before = read_ledger(kept / "ledger.jsonl").epsilons.certified
    client = _client(ensemble)
    budget = client.get("/budget").json()
    assert budget["earlier"] == 1
    assert budget["earlier_epsilon"] == pytest.approx(before)
    assert f"{kept.name}: it has spent epsilon" in client.get("/openapi.json").json()["info"]["description"]


BAD_BODIES = {
    "a key twice": (b'{"prompt": "a", "tokens": 1, "tokens": 2}', 422),
    "a prompt twice": (b'{"prompt": "a", "prompt": "b"}', 422),
    "a lone surrogate": (b'{"prompt": "a\\ud800b", "tokens": 1}', 422),
    "a surrogate as a key": (b'{"prompt": "a", "\\udfff": 1}', 422),
    "NaN": (b'{"prompt": "a", "tokens": NaN}', 422),
    "infinity": (b'{"prompt": "a", "tokens": 1e999}', 422),
    "NaN for a prompt": (b'{"prompt": NaN}', 422),
    "a number of 5,000 digits": (b'{"tokens": ' + b"9" * 5000 + b"}", 400),
    "no JSON": (b"{", 422),
    "nested lists": (b"[" * 50_000, 400),
    "bytes that are no UTF-8": (b'{"prompt": "\xff"}', 400),
    "a prompt that is too long": (b'{"prompt": "' + b"x" * (MOST_CHARACTERS + 1) + b'"}', 422),
    "a body that is too large": (b'{"prompt": "' + b"x" * 20_000_000 + b'"}', 413),
}


@pytest.mark.parametrize("body", BAD_BODIES)
def test_a_body_that_is_no_question_is_refused_and_costs_nothing(ensemble: Path, body: str) -> None:
    client, (content, status) = _client(ensemble), BAD_BODIES[body]
    reply = client.post("/generate", content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == status
    assert len(reply.content) < 500
    assert client.get("/budget").json()["tokens_left"] == TOKENS


def test_a_large_body_is_not_read_to_its_end(ensemble: Path) -> None:
    """With a length it is refused unread; in pieces, once the limit is passed."""
    client, read = _client(ensemble), 0

    def pieces() -> Iterator[bytes]:
        nonlocal read
        for _ in range(300):
            read += 65_536
            yield b"x" * 65_536

    headers = {"Content-Type": "application/json"}
    assert client.post("/generate", content=pieces(), headers=headers).status_code == 413
    assert client.post("/generate", content=b"{}", headers=headers | {"Content-Length": "20000000"}).status_code == 413


def test_the_longest_prompt_that_is_taken_fits_into_a_body(ensemble: Path) -> None:
    """Of characters that JSON spells with twelve bytes."""
    body = json.dumps({"prompt": "\U0001f600" * MOST_CHARACTERS, "tokens": 1})
    assert len(body) > 12 * MOST_CHARACTERS
    reply = _client(ensemble).post("/generate", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "a b"])
def test_another_host_spends_nothing(ensemble: Path, host: str) -> None:
    """A page of another site, whose name was made to mean this machine."""
    client = _client(ensemble)
    for path in ("/budget", "/docs"):
        assert client.get(path, headers={"Host": host}).status_code == 400
    assert client.post("/generate", json={"tokens": 1}, headers={"Host": host}).status_code == 400
    assert client.get("/budget").json()["tokens_left"] == TOKENS


def test_a_page_of_another_site_cannot_post_without_asking(ensemble: Path) -> None:
    """A form or a simple request has no JSON type, and a preflight finds no permission."""
    client = _client(ensemble)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        assert client.post("/generate", content=b'{"tokens": 1}', headers={"Content-Type": kind}).status_code == 422
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in client.options("/generate", headers=asked).headers
    assert client.get("/budget").json()["tokens_left"] == TOKENS


def test_names_that_are_trusted_are_answered(ensemble: Path) -> None:
    client = _client(ensemble, hosts=["answers.example", "*.inside.example", "[::1]"])
    for host in ("answers.example", "answers.example:8000", "a.inside.example", "ANSWERS.example", "[::1]:8000"):
        assert client.get("/budget", headers={"Host": host}).status_code == 200
    assert client.get("/budget", headers={"Host": "localhost"}).status_code == 400


SECRET = "0123456789abcDEF-Secret"


@pytest.mark.parametrize(
    "sent",
    [None, "", "Bearer", "Bearer x", f"Basic {SECRET}", "Bearer \xe9"]
    + [f"Bearer {near}" for near in (f"{SECRET}x", SECRET[:-1], SECRET.lower(), SECRET.upper(), SECRET.swapcase())],
)
def test_without_the_token_nothing_is_told_or_spent(ensemble: Path, sent: str | None) -> None:
    client = _client(ensemble, token=SECRET)
    headers = {} if sent is None else {"Authorization": sent.encode("latin-1")}
    for reply in (client.get("/budget", headers=headers), client.post("/generate", json={}, headers=headers)):
        assert reply.status_code == 401
        assert reply.headers["WWW-Authenticate"] == "Bearer"
        assert SECRET not in reply.text
    known = {"Authorization": f"Bearer {SECRET}"}
    assert client.get("/budget", headers=known).json()["tokens_left"] == TOKENS
    assert client.post("/generate", json={"tokens": 1}, headers=known).status_code == 200
    assert SECRET not in client.get("/openapi.json").text


def test_what_was_answered_before_the_disk_filled_is_given(ensemble: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment, real = deploy(ensemble, CPU), deployment_module.write_json
    deployment.tokenizer.eos_token = None  # no answer ends a text
    client = TestClient(create_app(deployment), base_url="http://localhost")
    calls = iter(range(100))

    def filling(*arguments: Any) -> None:
        if next(calls) >= 2:
            raise OSError(28, "No space left on device")
        real(*arguments)

    monkeypatch.setattr(deployment_module, "write_json", filling)
    reply = client.post("/generate", json={"prompt": "the", "tokens": 9})
    assert reply.status_code == 200
    assert len(reply.json()["answered"]) == 2
    assert "No space left" in reply.json()["stopped"]
    assert client.post("/generate", json={"prompt": "the", "tokens": 9}).status_code == 503


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--host", "\udcff"], "--host"),
        (["--host", "a b"], "--host"),
        (["--trusted-host", "*"], "--trusted-host"),
        (["--trusted-host", "a.example:80"], "--trusted-host"),
        (["--trusted-host", "a.*.example"], "--trusted-host"),
        (["--token-file", "nowhere"], "--token-file"),
        (["--token-file", "short"], "--token-file"),
        (["--token-file", "spaces"], "--token-file"),
        (["--token-file", "binary"], "--token-file"),
    ],
)
def test_serve_refuses_bad_names_and_tokens_before_it_opens_anything(
    arguments: list[str], field: str, ensemble: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short").write_text("abc\n")
    Path("spaces").write_text("a token with spaces\n")
    Path("binary").write_bytes(b"\xff" * 40)
    result = CliRunner().invoke(app, ["serve", "--ensemble", str(ensemble), *arguments])
    assert result.exit_code == 2, result.output
    assert f"error: {field}" in result.stderr
    assert not has_answered(ensemble)


def only_of_the_register(stderr: str) -> bool:
    """Whether there is one warning, that no register counts the ensemble, and none of the network."""
    told = " ".join(stderr.split())
    return told.count("warning") == told.count("no register counts its answers") == 1


def test_serve_takes_its_token_from_a_file_or_the_environment(
    ensemble: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import uvicorn

    served: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr(uvicorn, "run", lambda made, **options: served.append((made, options)))
    (tmp_path / "token").write_text(f"{SECRET}\n")
    by_file = ["--token-file", str(tmp_path / "token"), "--trusted-host", "answers.example"]
    base_command = ["serve", "--ensemble", str(ensemble), "--host"]
    for environment, more in (({}, by_file), ({TOKEN_VARIABLE: SECRET}, [])):
        result = CliRunner().invoke(app, [*base_command, "192.0.2.1", *more], env=environment)
        assert result.exit_code == 0, result.output
        assert only_of_the_register(result.stderr)
        client = TestClient(served[-1][0], base_url="http://192.0.2.1:8000")
        assert client.get("/budget").status_code == 401
        assert client.get("/budget", headers={"Authorization": f"Bearer {SECRET}"}).status_code == 200
    assert TestClient(served[0][0], base_url="http://answers.example").get("/docs").status_code == 200
    both = CliRunner().invoke(app, [*base_command, "::1", *by_file], env={TOKEN_VARIABLE: SECRET})
    assert "keep one of them" in both.stderr
    assert "can spend the budget" in CliRunner().invoke(app, [*base_command, "0.0.0.0"]).stderr
    assert TestClient(served[-1][0], base_url="http://0.0.0.0").get("/docs").status_code == 400
    assert only_of_the_register(CliRunner().invoke(app, [*base_command, "127.0.0.1"]).stderr)


def test_a_prompt_that_is_no_text_opens_no_ledger(ensemble: Path) -> None:
    """What the command line makes of an argument that is no UTF-8."""
    for prompt, reason in (("a\udcff", "not UTF-8"), ("x" * (MOST_CHARACTERS + 1), "16,384 are taken")):
        result = CliRunner().invoke(app, ["generate", prompt, "--ensemble", str(ensemble)])
        assert result.exit_code == 2
        assert reason in result.stderr
        assert not has_answered(ensemble)
