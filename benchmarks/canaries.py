"""Separation of text canaries by kind: ``python -m benchmarks.canaries MODEL [--canaries N] [--samples K]``.

MODEL is the folder of a public causal model, such as data/models/public after ``make repro``. Nothing is trained.
``dptune.audit.text.maximisers`` says what the separation is; here it is that beside 300 public texts.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from dptune.audit.text.likelihood import TOKENS, sampled_texts
from dptune.audit.text.maximisers import CHOICE, Gradients, adapter_gradients, separations
from dptune.records.canaries import _random_words, content_with
from dptune.records.diabetes.narratives import public_texts
from dptune.training.data import Tokens, tokenize
from dptune.training.models.model import ModelSource, load_base, load_tokenizer

RECORDS = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder of a public causal model")
    parser.add_argument("--canaries", type=int, default=256)
    parser.add_argument("--samples", type=int, default=CHOICE, help="samples for each one that is kept")
    given = parser.parse_args()
    torch.set_num_threads(1)
    source = ModelSource(given.model, None, "float32")
    model, tokenizer = load_base(source, torch.device("cpu")), load_tokenizer(source)

    def gradients(texts: list[str]) -> Gradients:
        return adapter_gradients(model, tokenize(texts, tokenizer, TOKENS + 2))

    records = gradients(public_texts(RECORDS, 7, "contexts", "synthetic"))
    chance = np.random.default_rng(0)

    def show(name: str, found: Gradients) -> None:
        chosen = found[chance.choice(len(found), given.canaries, replace=False)]
        norms = np.linalg.norm(chosen, axis=1).mean()
        print(f"| {name} | {norms:.2f} | {separations(chosen, records).mean():.3f} |", flush=True)

    print(f"| text | gradient norm | separation, {given.canaries} canaries |\n| --- | ---: | ---: |")
    carriers = public_texts(given.canaries, 42, "canaries", "synthetic")
    codes = ["".join(chance.choice([*"ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"], 10)) for _ in carriers]
    show("code", gradients([content_with(*one, "text").text for one in zip(carriers, codes, strict=True)]))  # type: ignore[union-attr]
    show("words", gradients(_random_words(given.canaries, 42)))
    every = np.arange(len(tokenizer))
    known = np.unique(np.concatenate(tokenize(public_texts(400, 11, "words", "synthetic"), tokenizer, 160).rows))
    for name, among in (("that 400 public texts have", known), ("that they have not", np.setdiff1d(every, known))):
        for length in (4, 64):
            rows = [chance.choice(among, length).astype(np.int32) for _ in carriers]
            found = adapter_gradients(model, Tokens(rows, tokenizer.pad_token_id, length + 2))
            show(f"{length} random tokens {name}", found)
    for temperature in (1.0, 1.5, 2.0, 3.0):
        began = time.process_time()
        texts = sampled_texts(model, tokenizer, given.samples * given.canaries, temperature=temperature, seed=101)
        found = gradients(texts)
        took = time.process_time() - began
        show(f"samples at temperature {temperature:g}", found)
        best = np.argsort(-np.linalg.norm(found, axis=1))[: given.canaries]
        show(f"of {given.samples} times as many, those with the largest norm ({took:.0f} s)", found[best])
        alone = np.argsort(-separations(found, records))[: given.canaries]
        show("of as many, those with the largest separation (maximisers)", found[alone])


if __name__ == "__main__":
    main()
