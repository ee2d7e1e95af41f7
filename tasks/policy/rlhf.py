"""Private reinforcement learning of the public model on users' prompts: train, measure, attack. One run a cell.

    python -m tasks.policy.rlhf --set users=32 --set epsilons=3     # one or more cells; see ``Rlhf`` for the names

Writes data/policy/rlhf/<run>/: ledger.jsonl, adapter/ (PEFT's), results.json, and, for the auditor alone, prompts.json.
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

from dptune.corpus.canaries import ALPHABET, SECRET_LENGTH
from dptune.corpus.records import Records, read_records
from dptune.errors import ConfigError
from dptune.files import jsonable, locked, private_directory, sha256, write_json, write_text
from dptune.policy.method import PUBLISHED_ACCOUNTANT, Dppg, calibrated_method, method_of
from dptune.privacy.entropy import OsEntropy
from dptune.privacy.ledger_file import read_ledger
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.run_header import RunHeader
from tasks.identity import code_digest
from tasks.paths import DATA, PUBLIC_MODEL, PUBLIC_VALIDATION, SPLITS
from tasks.settings.rlhf import Rlhf, settings_of
from tasks.stage import run_command

if TYPE_CHECKING:
    from dptune.policy.language.learner import Figures, LanguageLearner
    from dptune.policy.language.prompts import Prompts, Stream
    from dptune.policy.language.training import LanguageState

RLHF = DATA / "policy" / "rlhf"
PROMPTS = "prompts.json"
ATTACKS = ("secrets", "updates")
_ROWS = 128
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RlhfCell:
    """One run.

    Attributes:
        users: K.
        epsilon: the budget; None adds no noise.
        seed: of initial adapters, of who comes when and of everybody's samples; public.
    """

    settings: Rlhf
    users: int
    epsilon: float | None
    seed: int

    @property
    def label(self) -> str:
        """For people."""
        return f"K{self.users}.{'nonprivate' if self.epsilon is None else f'eps{self.epsilon:g}'}.seed{self.seed}"

    @property
    def directory(self) -> Path:
        """Its own, whatever decides the run: settings, data, base model and code.

        Keyed by a secret salt: the name is told to MLflow and reports, and must test no guess of a record.
        """
        shared = self.settings.model_dump(mode="json", exclude={"users", "epsilons", "seeds", "nonprivate"})
        files = [*sorted(PUBLIC_MODEL.glob("*.*")), PUBLIC_VALIDATION, SPLITS / "train.parquet"]
        files += [SPLITS / "attack.parquet"]
        content = (
            json.dumps(shared, sort_keys=True) + "".join(sha256(path) for path in files) + code_digest("policy.rlhf")
        )
        return RLHF / f"{self.label}-{hmac.digest(_salt(), content.encode(), 'sha256').hex()[:8]}"

    @property
    def method(self) -> Dppg:
        """With the least noise that certifies the budget."""
        options: dict[str, Any] = {"critic": "none"}
        if self.epsilon is None:
            return method_of(options | {"noise_multiplier": 0.0})
        return calibrated_method(options, self.epsilon, self.settings.delta)


def _salt() -> bytes:
    """Of the names of runs; made once, beside them."""
    path = RLHF / "salt"
    if not path.exists():
        private_directory(RLHF)
        with locked(RLHF / "salt.lock", wait=True):
            if not path.exists():
                write_text(path, secrets.token_hex(32))
    return path.read_bytes()


def cells(settings: Rlhf) -> list[RlhfCell]:
    """The grid, small numbers of users first."""
    budgets: list[float | None] = [None] * settings.nonprivate + list(settings.epsilons)
    return [
        RlhfCell(settings, users, epsilon, seed)
        for users, epsilon, seed in product(sorted(settings.users), budgets, settings.seeds)
    ]


@dataclass(frozen=True)
class PromptCanary:
    """A user that the auditor brings, where its coin says so."""

    slot: int
    record: int
    secret: str = field(repr=False)
    included: int = field(repr=False)


@dataclass(frozen=True)
class PromptPlan:
    """Who comes when, and every prompt's secret. Private; secrets and coins are of the operating system's entropy."""

    secrets: tuple[str, ...] = field(repr=False)
    canaries: tuple[PromptCanary, ...] = field(repr=False)

    @classmethod
    def drawn(cls, cell: RlhfCell, hosts: Records) -> PromptPlan:
        """A secret for every slot; canaries in random slots, which are public. Raises: ConfigError for too many."""
        slots, entropy = cell.users * cell.settings.updates, SystemRandom()
        count = cell.settings.canaries if cell.settings.telemetry == "research" else 0
        if count > min(slots, len(hosts.record)):
            problem = f"{count} do not fit into {slots} slots and {len(hosts.record)} records of the attack split"
            raise ConfigError("canaries", problem, fix="plant fewer")
        order = np.random.default_rng([cell.seed, 0])
        where, which = order.permutation(slots)[:count], order.permutation(hosts.record)[:count]
        secrets = ("".join(entropy.choice(ALPHABET) for _ in range(SECRET_LENGTH)) for _ in range(slots + count))
        planted = [
            PromptCanary(slot, record, next(secrets), entropy.getrandbits(1))
            for slot, record in zip(where.tolist(), which.tolist(), strict=True)
        ]
        return cls(tuple(secrets), tuple(planted))

    @classmethod
    def of(cls, cell: RlhfCell, hosts: Records, path: Path) -> PromptPlan:
        """The one that the run began with, or a new one, which is written to ``path``."""
        if not path.exists():
            write_json(path, asdict(cls.drawn(cell, hosts)))
        stored = json.loads(path.read_text(encoding="utf-8"))
        return cls(tuple(stored["secrets"]), tuple(PromptCanary(**one) for one in stored["canaries"]))


def run_cell(cell: RlhfCell, device: str = "cpu") -> dict[str, Any]:
    """Train, measure and attack one cell, unless it is done; resume what a dead process left. Returns its results.

    Raises: ConfigError for settings that the data cannot fill; LedgerError, BudgetError.
    """
    directory = private_directory(cell.directory)
    folder = RunFolder(directory)
    with locked(folder.lock):
        if not folder.results.exists():
            write_json(folder.results, _run(cell, directory, device))
    results: dict[str, Any] = json.loads(folder.results.read_text(encoding="utf-8"))
    return results


def _run(cell: RlhfCell, directory: Path, device: str) -> dict[str, Any]:
    from dptune.policy.language.training import train
    from dptune.training.model import save_adapter

    learner = _learner(cell, device)
    records, hosts = (read_records(SPLITS / f"{side}.parquet") for side in ("train", "attack"))
    plan = PromptPlan.of(cell, hosts, directory / PROMPTS)
    public, held_out = _public_prompts(cell, learner)
    users = _stream(cell, plan, records, hosts, learner)
    header, told = _header(cell, records), partial(_tell, cell)
    state, curve = train(learner, users, public, held_out, header, directory, OsEntropy(), told)
    save_adapter(learner.policy.peft(state.adapter), private_directory(RunFolder(directory).adapter))
    results = _results(cell, directory, learner, curve)
    if plan.canaries:
        results["audit"] = _audit(cell, plan, hosts, learner, state, users, public)
        results["violations"] = violations(results)
    return results


def _tell(cell: RlhfCell, point: Figures) -> None:
    _log.info("%s, update %d: held-out reward %.3f, KL %.3f", cell.label, point.updates, point.reward, point.kl)


def _learner(cell: RlhfCell, device: str) -> LanguageLearner:

    from dptune.policy.language.learner import LanguageLearner
    from dptune.policy.language.lexicon import CLINICAL
    from dptune.policy.language.policy import LanguagePolicy
    from dptune.policy.language.schedule import Bandit
    from dptune.training.model import Lora, ModelSource, check_device, load_base, load_tokenizer

    base, settings = ModelSource(str(PUBLIC_MODEL)), cell.settings
    lora = Lora(settings.rank, settings.alpha, 0.0)
    policy = LanguagePolicy(load_base(base, check_device(device)), load_tokenizer(base), lora, cell.seed)
    shared = {name: getattr(settings, name) for name in Bandit.__dataclass_fields__ if name not in ("users", "seed")}
    return LanguageLearner(policy, CLINICAL, cell.method, Bandit(users=cell.users, seed=cell.seed, **shared))


def _public_prompts(cell: RlhfCell, learner: LanguageLearner) -> tuple[Prompts, Prompts]:
    """Simulated users: of the baseline, and held out."""
    from dptune.audit.prompts import planted

    texts, settings = read_records(PUBLIC_VALIDATION).text.to_pylist(), cell.settings
    wanted = settings.baseline_prompts + settings.held_out_prompts
    if wanted > len(texts):
        problem = f"baseline_prompts and held_out_prompts ask for {wanted} of {len(texts)} public narratives"
        raise ConfigError("held_out_prompts", problem, fix="use fewer, or raise pretrain.validation_encounters")
    codes = np.random.default_rng([cell.seed, 1]).choice(list(ALPHABET), (wanted, SECRET_LENGTH))
    told = [planted(text, "".join(code)) for text, code in zip(texts[:wanted], codes, strict=True)]
    prompts = _prompts(told, learner)
    return prompts[: settings.baseline_prompts], prompts[settings.baseline_prompts :]


def _prompts(texts: list[str], learner: LanguageLearner) -> Prompts:
    from dptune.policy.language.prompts import Prompts

    return Prompts.of(texts, learner.policy.tokenizer, learner.bandit.prompt_tokens)


def _stream(cell: RlhfCell, plan: PromptPlan, records: Records, hosts: Records, learner: LanguageLearner) -> Stream:
    """A record of the train split in every slot, each once, and canaries in theirs."""
    import torch

    from dptune.audit.prompts import check_whole, planted
    from dptune.policy.language.prompts import Stream

    slots = cell.users * cell.settings.updates
    if slots > len(records.record):
        problem = f"{cell.settings.updates} updates of {cell.users} ask for more than {len(records.record)} prompts"
        raise ConfigError("updates", problem, fix="use fewer, or more records (data.synthetic.encounters)")
    rows = np.random.default_rng([cell.seed, 2]).permutation(len(records.record))[:slots]
    ids, texts = records.record[rows].tolist(), list(map(records.texts("policy.rlhf").__getitem__, rows))
    secrets, present = list(plan.secrets), torch.ones(slots, dtype=torch.bool)
    told = dict(zip(hosts.record.tolist(), hosts.text.to_pylist(), strict=True))
    for one in plan.canaries:
        ids[one.slot], texts[one.slot], secrets[one.slot] = one.record, told[one.record], one.secret
        present[one.slot] = bool(one.included)
    # Of the auditor's own users only: whether a run happens must not depend on another's text.
    mine = [(told[one.record], one.secret) for one in plan.canaries]
    hosted, codes = [text for text, _ in mine], [secret for _, secret in mine]
    check_whole(learner.policy.tokenizer, hosted, codes, learner.bandit.prompt_tokens)
    prompts = _prompts([planted(text, secret) for text, secret in zip(texts, secrets, strict=True)], learner)
    return Stream(tuple(ids), prompts, present)


def _header(cell: RlhfCell, records: Records) -> RunHeader:
    return RunHeader(
        mechanism="dppg",
        published_accountant=PUBLISHED_ACCOUNTANT,
        accounting="certified",
        epsilon=cell.epsilon,
        delta=cell.settings.delta,
        unit="prompt",
        units=cell.users * cell.settings.updates,
        data=str(records.about["label"]),
        telemetry=cell.settings.telemetry,  # curves are of simulated users; what the attacks find is not
    )


def _results(cell: RlhfCell, directory: Path, learner: LanguageLearner, curve: list[Figures]) -> dict[str, Any]:
    contents, last = read_ledger(RunFolder(directory).ledger), asdict(curve[-1])
    return {
        "label": cell.label,
        "data": contents.header.data,
        "unit": contents.header.unit,
        "users": cell.users,
        "updates": cell.settings.updates,
        "prompts": contents.header.units,
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
        **{name: last[name] for name in ("reward", "score", "kl")},
        "curve": [asdict(point) for point in curve],
    }


def _audit(
    cell: RlhfCell,
    plan: PromptPlan,
    hosts: Records,
    learner: LanguageLearner,
    state: LanguageState,
    users: Stream,
    public: Prompts,
) -> dict[str, Any]:
    """Both attacks, and the exposure of the secrets that were planted."""
    from dptune.audit.exposure import chance, exposures
    from dptune.audit.prompts import audited, opening, secret_scores, update_scores

    settings, policy, canaries = cell.settings, learner.policy, plan.canaries
    told = dict(zip(hosts.record.tolist(), hosts.text.to_pylist(), strict=True))
    texts, slots = [told[one.record] for one in canaries], [one.slot for one in canaries]
    secrets, included = [one.secret for one in canaries], np.array([bool(one.included) for one in canaries])
    tuned, width = policy.peft(state.adapter), settings.prompt_tokens
    scores = {
        "secrets": secret_scores(tuned, policy.model, policy.tokenizer, texts, secrets, max_length=width, rows=_ROWS),
        "updates": update_scores(learner, state, users.prompts[slots], slots, public),
    }
    alarm = 1 - settings.false_alarms / len(scores)
    found: dict[str, Any] = {
        name: audited(values, included, settings.delta, settings.confidence, alarm) for name, values in scores.items()
    }
    planted = [(opening(text), secret) for text, secret, there in zip(texts, secrets, included, strict=True) if there]
    bits = exposures(tuned, policy.tokenizer, planted, candidates=settings.candidates, max_length=width + 1, rows=_ROWS)
    return found | {
        "exposure": {"mean": float(bits.mean()), "most": float(bits.max()), "chance": chance(settings.candidates)}
    }


def violations(results: dict[str, Any]) -> list[str]:
    """Every bound that exceeds what the ledger certifies: the mechanism or its accountant is wrong.

    Sound runs are named here with a chance of ``false_alarms`` at most, each.
    """
    certified = float(results["epsilon_certified"])
    return [
        f"{results['label']}: an attack on its canaries ({attack}) shows epsilon >= {shown:.3g}, "
        f"but {certified:.3g} is certified: the mechanism, its accountant or its data handling is wrong"
        for attack in ATTACKS
        if (shown := results["audit"][attack]["epsilon_alarm"]) > certified
    ]


def main(
    change: Annotated[list[str] | None, typer.Option("--set", help="NAME=VALUE, an entry of Rlhf; repeatable")] = None,
    device: Annotated[str, typer.Option(help="torch device")] = "cpu",
) -> None:
    """Run one or more cells, and print a line of results for each."""
    for cell in cells(settings_of(change or [])):
        results = run_cell(cell, device)
        # Not what the attacks found: these lines reach the flow's log.
        print(json.dumps({key: value for key, value in results.items() if key not in ("curve", "audit")}))


if __name__ == "__main__":
    run_command(main)
