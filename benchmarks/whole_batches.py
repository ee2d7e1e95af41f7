"""Text canaries in a private run of few steps that each take all units: ``python -m benchmarks.whole_batches MODEL``.

MODEL is the folder of a public causal model, such as data/models/public after ``make repro``. Each run plants canaries
by fair coins beside public texts that play the records; then the alignment score guesses the coins. The run is one
Gaussian of the given mu: no schedule shows more of a unit at the same epsilon. Canaries are ``words``, ``samples``, or
``new``: one token of the canary's own, four times, which is added to the vocabulary before the run and stands in no
other text (Panda et al. 2025). Coins and noise come from the operating system's entropy.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dptune.audit.one_run import one_run
from dptune.audit.text.likelihood import sampled_texts
from dptune.audit.text.membership import alignment_scores, membership_report
from dptune.core.settings import Lora, TrainedWeights, UpdateRule
from dptune.mechanisms.registry import build, of_model
from dptune.privacy.accountants import epsilons
from dptune.privacy.entropy import OsEntropy
from dptune.records.canaries import _random_words
from dptune.records.diabetes.narratives import public_texts
from dptune.training.data import Tokens, tokenize
from dptune.training.loop import train
from dptune.training.models.model import ModelSource, load_base, load_tokenizer
from dptune.training.models.own_weights import groups_of, start_training
from dptune.training.privacy_units import PrivacyUnits
from dptune.training.spec import RunSpec, TrainingPlan, header_of

_DELTA, _ROWS = 1e-5, 64
_LENGTH, _WIDTH = 4, 160
_NO_MOMENTUM = 1e-9  # zero is refused
_TRAINED = {
    "lora": TrainedWeights(),
    "embeddings": TrainedWeights(train="layers", train_layers="wte|lm_head"),
    "all": TrainedWeights(train="all"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Print what one run of each kind, trained weights and mu shows, a line of a table each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a public causal model")
    parser.add_argument("--canaries", type=int, default=1000)
    parser.add_argument("--records", type=int, default=300)
    parser.add_argument("--public", type=int, default=128, help="texts that the score holds back")
    parser.add_argument("--kind", nargs="+", choices=("words", "samples", "new"), default=["new"])
    parser.add_argument("--train", nargs="+", choices=tuple(_TRAINED), default=["embeddings"])
    parser.add_argument("--mu", nargs="+", type=float, default=[0.92, 1.666], help="of the run; epsilons of 4 and 8")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1.0, help="of plain SGD")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    print("| canaries | train | epsilon certified | audited | right guesses | mu shown | AUC | TPR at 1 % | seconds |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    for kind, train_what, mu in itertools.product(given.kind, given.train, given.mu):
        print(f"| {given.canaries} {kind} | {train_what} | {one_line(given, kind, train_what, mu)} |", flush=True)


def one_line(given: argparse.Namespace, kind: str, trains: str, mu: float) -> str:
    """Train one run and attack it. Returns the figures of its line."""
    began = time.process_time()
    source = ModelSource(given.model, None, "float32")
    tokenizer = load_tokenizer(source)
    canaries = _canaries(kind, given.canaries, source, tokenizer)
    records = tokenize(public_texts(given.records, 7, "contexts", "synthetic"), tokenizer, _WIDTH)
    public = tokenize(public_texts(given.public, 11, "words", "synthetic"), tokenizer, _WIDTH)

    def model() -> Any:
        base = _base(source, given.canaries if kind == "new" else 0)
        return start_training(base, _TRAINED[trains], Lora(dropout=0.0), 0).eval()

    entropy, released = OsEntropy(), model()
    coins = np.random.default_rng().integers(2, size=given.canaries).astype(bool)
    rows = [*records.rows, *(row if coin else row[:0] for row, coin in zip(canaries.rows, coins, strict=True))]
    absent = np.concatenate([np.zeros(len(records.rows), bool), ~coins])
    units, groups = PrivacyUnits.records(len(rows), absent), groups_of(released)
    entry = {"max_grad_norm": 0.1, "noise_multiplier": given.steps**0.5 / mu}
    mechanism = build("static", of_model("static", entry, len(groups), sum(group.size for group in groups)))
    plan = TrainingPlan(
        sample_rate=1.0,
        expected_batch_size=float(len(units)),
        steps=given.steps,
        rule=UpdateRule(optimizer="sgd", momentum=_NO_MOMENTUM),
        learning_rate=given.learning_rate,
        warmup_steps=0,
        physical_batch_size=_ROWS,
    )
    header = header_of(mechanism, units, entropy, delta=_DELTA, train=_TRAINED[trains].said)
    with tempfile.TemporaryDirectory() as folder:
        spec = RunSpec(released, Tokens(rows, canaries.padding, _WIDTH), units, mechanism, plan, header)
        ledger = train(spec, Path(folder), entropy)
        certified = epsilons(ledger.composition, _DELTA).certified
        ledger.close()
    scores = alignment_scores(model(), released.eval(), canaries, public, rows=_ROWS)
    found, rates = one_run(scores, coins, _DELTA, 0.95), membership_report(scores[coins], scores[~coins])
    shown = f"{certified:.2f} | {found.epsilon_audited:.2f} | {found.correct} of {found.guesses}"
    seen = f"{found.mu_gaussian:.2f} of {mu:g} | {rates['auc']:.3f} | {rates.get('tpr_at_fpr_0.01', np.nan):.3f}"
    return f"{shown} | {seen} | {time.process_time() - began:.0f}"


def _base(source: ModelSource, new: int) -> Any:
    """The public model, with so many more tokens, whose embeddings a public seed draws."""
    base = load_base(source, torch.device("cpu"))
    if new:
        torch.manual_seed(0)
        base.resize_token_embeddings(len(base.get_input_embeddings().weight) + new, mean_resizing=False)
    return base.requires_grad_(False)


def _canaries(kind: str, count: int, source: ModelSource, tokenizer: Any) -> Tokens:
    if kind == "words":
        return tokenize(_random_words(count, 42), tokenizer, _WIDTH)
    base = load_base(source, torch.device("cpu"))
    if kind == "samples":
        return tokenize(sampled_texts(base, tokenizer, count, seed=101), tokenizer, _WIDTH)
    first = len(base.get_input_embeddings().weight)
    return Tokens([np.full(_LENGTH, first + one, np.int32) for one in range(count)], tokenizer.pad_token_id, _WIDTH)


if __name__ == "__main__":
    main()
