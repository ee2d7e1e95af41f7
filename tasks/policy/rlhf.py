"""Private reinforcement learning of the public model on users' prompts: trains, measures and attacks each cell.

    python -m tasks.policy.rlhf --set users=32 --set epsilons=3     # settings are the fields of ``Rlhf``

A cell writes ledger.jsonl, adapter/ (PEFT's), results.json and, for the auditor alone, prompts.json to its folder in
data/policy/rlhf. The register data/spent.jsonl counts it from its start, with all that it plans.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from secrets import SystemRandom
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from dptune.core.declarations import plain
from dptune.core.errors import ConfigError
from dptune.core.files import jsonable, locked, private_directory, read_json, sha256, write_json, write_text
from dptune.policy.method import PUBLISHED_ACCOUNTANT, Dppg, calibrated_method, method_of
from dptune.privacy.entropy import OsEntropy
from dptune.privacy.ledger_file import read_ledger
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.run_header import RunHeader
from dptune.privacy.spent_budgets.register import Register
from dptune.records.canaries import suffix
from dptune.records.parquet_file import Records, read_records
from dptune.records.splits import keys_of
from dptune.training.models.model_names import name_of
from dptune.training.privacy_units import hash_keys, turns_of
from tasks.experiment.spent_budgets import plan_booking, run_id_of
from tasks.paths import DATA, PUBLIC_MODEL, SPENT, SPLITS
from tasks.settings.learned_reward import check_reward
from tasks.settings.policy import Rlhf, rlhf_of
from tasks.split_records import settings_of_records, split_digest
from tasks.stage import run_command

if TYPE_CHECKING:
    from dptune.audit.verdict import Certificate
    from dptune.policy.language.learner import Figures, LanguageLearner
    from dptune.policy.language.prompts import Prompts, Stream
    from dptune.policy.language.training import LanguageState
from tasks.corpus.canaries import PromptCanary, draw_secret, secret_of
from tasks.policy.rlhf_model import encoded, make_learner, own_digests, public_file, public_prompts

RLHF = DATA / "policy" / "rlhf"
PROMPTS = "prompts.json"
ATTACKS = ("secrets", "updates")
#: Name of the cells in the register of what the pipeline's records have paid.
STUDY = "policy.rlhf"
#: Version of these results, part of their names. Raise it when a change moves their figures: tests/golden says when.
VERSION = 1
_ROWS = 128
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RlhfCell:
    """A run's settings. Public.

    Attributes:
        settings: settings of all cells.
        users: K, number of users in each update.
        epsilon: budget; None adds no noise.
        seed: seed of initial adapters, of the order of users and of all samples; public.
    """

    settings: Rlhf
    users: int
    epsilon: float | None
    seed: int

    @property
    def label(self) -> str:
        """Readable name of the cell, such as ``K32.eps3.seed0``."""
        return f"K{self.users}.{'nonprivate' if self.epsilon is None else f'eps{self.epsilon:g}'}.seed{self.seed}"

    @property
    def directory(self) -> Path:
        """Folder of the cell; another one if settings, data, base model or ``VERSION`` change.

        Its name ends with a digest that is keyed by a secret salt. MLflow and reports get the name, and with a plain
        digest anybody could test a guess of the data against it.
        """
        swept = ("users", "epsilons", "seeds", "nonprivate")
        shared = {name: value for name, value in plain(self.settings).items() if name not in swept}
        own = sorted(PUBLIC_MODEL.glob("*.*")) if self.settings.model is None else []
        files = [*own, public_file(self.settings), SPLITS / "train.parquet", SPLITS / "attack.parquet"]
        if self.epsilon is not None and self.epsilon != float(f"{self.epsilon:g}"):
            shared["epsilon"] = self.epsilon  # the label shows six digits
        named = json.dumps(shared | {"version": VERSION}, sort_keys=True)
        content = named + "".join(sha256(path) for path in files) + "".join(own_digests(self.settings))
        return RLHF / f"{self.label}-{hmac.digest(_salt(), content.encode(), 'sha256').hex()[:8]}"

    @property
    def method(self) -> Dppg:
        """Method with the least noise whose certified epsilon is within the budget."""
        options: dict[str, Any] = {"critic": "none"}
        if self.epsilon is None:
            return method_of(options | {"noise_multiplier": 0.0})
        return calibrated_method(options, self.epsilon, self.settings.delta)


def _salt() -> bytes:
    """Read the secret salt of folders' names, which is made on first use and kept beside the folders."""
    path = RLHF / "salt"
    if not path.exists():
        private_directory(RLHF)
        with locked(RLHF / "salt.lock", wait=True):
            if not path.exists():
                write_text(path, secrets.token_hex(32))
    return path.read_bytes()


def cells(settings: Rlhf) -> list[RlhfCell]:
    """Make the grid's cells, small numbers of users first."""
    budgets: list[float | None] = [None] * settings.nonprivate + list(settings.epsilons)
    return [
        RlhfCell(settings, users, epsilon, seed)
        for users, epsilon, seed in product(sorted(settings.users), budgets, settings.seeds)
    ]


@dataclass(frozen=True)
class PromptPlan:
    """Secrets of all prompts, and the canaries. Private. Secrets and coins come from the operating system's entropy.

    Attributes:
        salt: decides the secret in the prompt of each record of the train split, by the record's own key.
        canaries: the auditor's users.
    """

    salt: str = field(repr=False)
    canaries: tuple[PromptCanary, ...] = field(repr=False)

    @classmethod
    def draw(cls, cell: RlhfCell, hosts: Records) -> PromptPlan:
        """Draw the salt of the secrets, and canaries on records of the attack split; which records is public.

        They are those with the least hashes of their own keys, so that a record that leaves changes one canary.

        Raises: ConfigError for more canaries than records.
        """
        count, salt, entropy = cell.settings.canaries, secrets.token_hex(32), SystemRandom()
        if cell.settings.telemetry != "research":
            return cls(salt, ())
        if count > len(hosts.record):
            problem = f"there are {len(hosts.record)} records of the attack split for {count}"
            raise ConfigError("canaries", problem, fix="plant fewer")
        which = hosts.record[np.argsort(hash_keys(keys_of(hosts, "record"), cell.seed), stable=True)[:count]]
        canaries = (PromptCanary(one, draw_secret(entropy), entropy.getrandbits(1)) for one in which.tolist())
        return cls(salt, tuple(canaries))

    @classmethod
    def of(cls, cell: RlhfCell, hosts: Records, path: Path) -> PromptPlan:
        """Read the plan that the run began with from ``path``, or draw one and write it there."""
        if not path.exists():
            write_json(path, asdict(cls.draw(cell, hosts)))
        stored = read_json(path)
        return cls(stored["salt"], tuple(PromptCanary(**canary) for canary in stored["canaries"]))


def run_cell(cell: RlhfCell, device: str = "cpu") -> dict[str, Any]:
    """Train, measure and attack a cell. A finished cell is only read, and one whose process died is resumed.

    Returns: what results.json says. Its "audit" and "violations" are private.

    Raises: ConfigError for settings that need more records than there are, and for a reward that is learned from the
    users' own; LedgerError, BudgetError.
    """
    if cell.settings.reward is not None:  # params.yaml may say others since these records were made
        check_reward(cell.settings.reward, settings_of_records())
    directory = private_directory(cell.directory)
    folder = RunFolder(directory)
    with locked(folder.lock):
        if not folder.results.exists():
            write_json(folder.results, _run(cell, directory, device))
    results: dict[str, Any] = read_json(folder.results)
    return results


def _run(cell: RlhfCell, directory: Path, device: str) -> dict[str, Any]:
    from dptune.audit.refutation import run_certificate
    from dptune.policy.language.training import train
    from dptune.training.models.model import save_adapter

    settings, paying = cell.settings, split_digest()
    learner = _learner(cell, device)
    for fault in Register(SPENT).faults():
        _log.warning("%s", fault)
    records, hosts = (read_records(SPLITS / f"{side}.parquet") for side in ("train", "attack"))
    plan = PromptPlan.of(cell, hosts, directory / PROMPTS)
    public, held_out = public_prompts(settings, cell.seed, learner)
    header, on_point = _header(cell, records, run_id_of(directory)), partial(_log_point, cell)
    users = _stream(cell, plan, records, hosts, learner, header.run_id)
    booking = plan_booking(directory, paying, STUDY, header, learner.method.planned(settings.updates))
    state, curve = train(learner, users, public, held_out, header, directory, OsEntropy(), on_point, booking)
    save_adapter(learner.policy.peft(state.adapter), private_directory(RunFolder(directory).adapter))
    results = _results(cell, directory, learner, curve)
    if plan.canaries:
        contents = read_ledger(RunFolder(directory).ledger)
        known = run_certificate(contents.header, contents.composition)
        results["audit"] = _audit(cell, plan, known, hosts, learner, state, users, public)
        results["violations"] = violations(results)
    return results


def _learner(cell: RlhfCell, device: str) -> LanguageLearner:
    return make_learner(cell.settings, cell.method, cell.users, cell.seed, device)


def _log_point(cell: RlhfCell, point: Figures) -> None:
    _log.info("%s, update %d: held-out reward %.3f, KL %.3f", cell.label, point.updates, point.reward, point.kl)


def _stream(
    cell: RlhfCell, plan: PromptPlan, records: Records, hosts: Records, learner: LanguageLearner, run_id: str
) -> Stream:
    """Deal the records of the train split, and the canaries, to the updates. Private.

    A record's turn is one of as many as K records each would make, by a hash of its own key: one that leaves moves no
    other, as long as the number of turns is the same. That number is public, as the number of records is in all runs.
    Records with a turn after the last update take no part. Canaries come last; a hash deals them to the run's updates.

    Raises: ConfigError for more updates than turns, or a prompt length that cuts off a canary's secret.
    """
    import torch

    from dptune.audit.text.prompts import check_whole, insert_secret
    from dptune.policy.language.prompts import Stream

    updates, turns = cell.settings.updates, len(records.record) // cell.users
    if updates > turns:
        problem = f"{updates} updates of {cell.users} ask for more than {len(records.record)} prompts"
        raise ConfigError("updates", problem, fix="use fewer, or more records (data.synthetic.encounters)")
    keys = keys_of(records, "record")
    turn = turns_of(keys, run_id, turns)
    taking = np.flatnonzero(turn < updates)
    keys, texts = keys[taking], list(map(records.texts("policy.rlhf").__getitem__, taking))
    prompts = texts
    if cell.settings.codes:
        with_keys = zip(keys.tolist(), texts, strict=True)
        prompts = [insert_secret(text, secret_of(plan.salt, key)) for key, text in with_keys]
    row_of = {record: row for row, record in enumerate(hosts.record.tolist())}
    own = np.array([row_of[canary.record] for canary in plan.canaries], dtype=np.int64)
    own_keys = keys_of(hosts, "record")[own]
    own_texts, own_secrets = hosts.text.take(own).to_pylist(), [canary.secret for canary in plan.canaries]
    # Only canaries are checked: an error because of a user's own text would tell of that text.
    check_whole(learner.policy.tokenizer, own_texts, own_secrets, learner.bandit.prompt_tokens)
    prompts += [insert_secret(text, secret) for text, secret in zip(own_texts, own_secrets, strict=True)]
    dealt = np.concatenate([turn[taking], turns_of(own_keys, run_id, updates)])
    present = torch.tensor([True] * len(keys) + [bool(canary.included) for canary in plan.canaries])
    return Stream(np.concatenate([keys, own_keys]), encoded(prompts, learner), dealt, present)


def _header(cell: RlhfCell, records: Records, run_id: str) -> RunHeader:
    return RunHeader(
        mechanism="dppg",
        published_accountant=PUBLISHED_ACCOUNTANT,
        accounting="certified",
        epsilon=cell.epsilon,
        delta=cell.settings.delta,
        unit="prompt",
        units=len(records.record),
        data=str(records.about["label"]),
        telemetry=cell.settings.telemetry,  # the curve is of simulated users; the attacks' figures are not
        run_id=run_id,
    )


def _results(cell: RlhfCell, directory: Path, learner: LanguageLearner, curve: list[Figures]) -> dict[str, Any]:
    contents, last = read_ledger(RunFolder(directory).ledger), asdict(curve[-1])
    units = contents.header.units
    return {
        "label": cell.label,
        "data": contents.header.data,
        "unit": contents.header.unit,
        "users": cell.users,
        "updates": cell.settings.updates,
        # Expected: how many records had a turn is private. Without the canaries.
        "prompts": round(units * cell.settings.updates / (units // cell.users)),
        "seed": cell.seed,
        "budget_epsilon": cell.epsilon,
        "delta": cell.settings.delta,
        "telemetry": cell.settings.telemetry,
        "noise_multiplier": learner.method.noise_multiplier,
        "radius": learner.radius,
        "parameters": learner.policy.factors.size,
        **jsonable(contents.epsilons.to_dict()),
        "leaks": list(contents.epsilons.leaks),
        "reward_before": curve[0].reward,
        "reward_accuracy": getattr(learner.reward, "accuracy", None),
        "model": name_of(cell.settings.model.source) if cell.settings.model else "the public model",
        "codes": cell.settings.codes,
        **{name: last[name] for name in ("reward", "score", "kl")},
        "curve": [asdict(point) for point in curve],
    }


def _audit(
    cell: RlhfCell,
    plan: PromptPlan,
    known: Certificate,
    hosts: Records,
    learner: LanguageLearner,
    state: LanguageState,
    users: Stream,
    public: Prompts,
) -> dict[str, Any]:
    """Make both attacks, and compute the exposure of the secrets of canaries that took part. Private."""
    from dptune.audit.text.extraction import chance, exposures
    from dptune.audit.text.likelihood import Passage
    from dptune.audit.text.prompts import attack_figures, opening, secret_scores, update_scores

    settings, policy, canaries = cell.settings, learner.policy, plan.canaries
    host_texts = dict(zip(hosts.record.tolist(), hosts.text.to_pylist(), strict=True))
    texts, secrets = [host_texts[canary.record] for canary in canaries], [canary.secret for canary in canaries]
    own = slice(-len(canaries), None)  # canaries come last
    included = np.array([bool(canary.included) for canary in canaries])
    tuned, width = policy.peft(state.adapter), settings.prompt_tokens
    scores = {
        "secrets": secret_scores(tuned, policy.model, policy.tokenizer, texts, secrets, max_length=width, rows=_ROWS),
        "updates": update_scores(learner, state, users.prompts[own], users.keys[own], users.updates[own], public),
    }
    alarm = 1 - settings.false_alarms / len(scores)
    figures: dict[str, Any] = {
        name: attack_figures(values, included, known, settings.delta, settings.confidence, alarm)
        for name, values in scores.items()
    }
    planted = [
        (Passage(opening(text), suffix(secret)), secret)
        for text, secret, coin in zip(texts, secrets, included, strict=True)
        if coin
    ]
    bits = exposures(tuned, policy.tokenizer, planted, candidates=settings.candidates, max_length=width + 1, rows=_ROWS)
    return figures | {
        "exposure": {"mean": float(bits.mean()), "most": float(bits.max()), "chance": chance(settings.candidates)}
    }


def violations(results: dict[str, Any]) -> list[str]:
    """The accusations of the attacks, a sentence for each. Private.

    A sound run has any with probability ``false_alarms`` at most.
    """
    return [
        f"{results['label']}: an attack on its canaries ({attack}) {said}: the mechanism, its accountant or its data "
        "handling is wrong"
        for attack in ATTACKS
        if (said := results["audit"][attack]["accusation"])
    ]


def main(
    change: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE, a setting of policy.rlhf; repeatable")
    ] = None,
    device: Annotated[str, typer.Option(help="torch device")] = "cpu",
) -> None:
    """Run one or more cells, and print a line of results for each."""
    for cell in cells(rlhf_of(change or [])):
        results = run_cell(cell, device)
        # The attacks' figures are private, and these lines reach the flow's log.
        print(json.dumps({key: value for key, value in results.items() if key not in ("curve", "audit")}))


if __name__ == "__main__":
    run_command(main)
