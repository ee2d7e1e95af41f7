"""Ten million records and a million releases: ``python -m benchmarks.scale [--records N] [--lines N] [--folder PATH]``.

Each figure comes from a process of its own, beside a named peer in the same run: a mask over all units for draws,
records and units in lists of arrays for memory, a JSON line and its fsync for charges, SHA-256 of the file for reading
a ledger. Memory is anonymous resident memory (RssAnon), the most of looks every 5 ms; pages of a mapped file come and
go as the kernel likes.
Needs about 100 bytes of disk a record and 330 a ledger line, under ``--folder`` (a new one, removed at the end).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from dptune.core.settings import Lora
from dptune.mechanisms.registry import build
from dptune.privacy.accounting.renyi_filter import RenyiFilter
from dptune.privacy.entropy import OsEntropy
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import read_ledger
from dptune.privacy.release import Composition, Release
from dptune.privacy.run_header import RunHeader
from dptune.training.data import Tokens
from dptune.training.gradients.parameter_groups import lora_pairs
from dptune.training.loop import train
from dptune.training.models.model import attach_lora
from dptune.training.privacy_units import PrivacyUnits
from dptune.training.spec import RunSpec, TrainingPlan, header_of
from dptune.training.tokens.token_file import open_corpus, token_batch, write

FEW, BATCH, STEPS = 100_000, 16, 8
VOCABULARY, SHORTEST, LONGEST = 97, 8, 24
HEADER: dict[str, Any] = {"published_accountant": "gdp_clt", "accounting": "certified", "epsilon": None, "delta": 1e-5}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--records", type=int, default=10_000_000)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--part", nargs="+", help="used by the benchmark itself")
    arguments = parser.parse_args()
    if arguments.part:
        name, *rest = arguments.part
        warnings.simplefilter("ignore")
        print(json.dumps(PARTS[name](*rest)))
        return
    with tempfile.TemporaryDirectory(prefix="scale-", dir=arguments.folder) as folder:
        _report(Path(folder), arguments.records, arguments.lines)


def _report(folder: Path, records: int, lines: int) -> None:
    files = {count: folder / f"{count}.arrow" for count in (FEW, records)}
    for count, path in files.items():
        made = _part("corpus", path, count)
        print(f"{count:,} records: {made['megabytes']:.0f} MB, written in {made['seconds']:.1f} s, {_memory(made)}")
    for count, path in files.items():
        for form in ("mapped", "mapped by patient", "listed"):
            print(f"{STEPS} steps of {count:,} records, {form}: {_memory(_part('training', form, path))}")
    for count in files:
        found = _part("draws", count)
        print(
            f"a draw of {BATCH} of {count:,}: {1000 * found['ours']:.3f} ms, "
            f"{found['ours'] / found['mask']:.4f} of a mask's {1000 * found['mask']:.2f} ms"
        )
    for kind in ("same", "moving"):
        found = _part("charges", kind, folder / f"{kind}.jsonl")
        print(
            f"a charge, {kind} noise: {found['charge']:.4f} ms, {found['charge'] / found['json']:.2f} of a JSON line; "
            f"with fsync {found['charge and fsync']:.3f} ms, {found['charge and fsync'] / found['json and fsync']:.2f}"
        )
    for kind in ("same", "moving"):
        found = _part("verify", kind, folder / "million.jsonl", lines)
        print(
            f"{lines:,} lines, {kind} noise ({found['kinds']:,} kinds): read in {found['read']:.1f} s "
            f"({found['read'] / found['sha256']:.1f} of SHA-256), priced in {found['price']:.1f} s, {_memory(found)}"
        )


def _part(*arguments: Any) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.scale", "--part", *map(str, arguments)]
    return dict(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1]))


def _memory(found: dict[str, Any]) -> str:
    return f"{found['memory']:.0f} MB at most (imports {found['imports']:.0f} MB)"


def _anonymous() -> float:
    """Anonymous resident memory of this process, in MB."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")) / 1024


class _Watch:
    """The most anonymous memory while this is open, and what there was before."""

    def __enter__(self) -> _Watch:
        self.before = self.most = _anonymous()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._done.wait(0.005):
            self.most = max(self.most, _anonymous())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def found(self) -> dict[str, float]:
        return {"memory": self.most, "imports": self.before}


# --- a corpus and its training ----------------------------------------------------------------------------


def corpus(path: str, count: str) -> dict[str, float]:
    """Random records, streamed into a token file."""

    def batches(rows: int = 4096) -> Iterator[Any]:
        for first in range(0, int(count), rows):
            some = _rows(first, min(rows, int(count) - first))
            yield token_batch(some, np.arange(first, first + len(some)) // 2)

    start = time.perf_counter()
    with _Watch() as watch:
        write(Path(path), batches(), padding=0, width=LONGEST + 2)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "megabytes": Path(path).stat().st_size / 1e6, **watch.found()}


def _rows(seed: int, count: int) -> list[Any]:
    generator = np.random.default_rng(seed)
    ids = generator.integers(1, VOCABULARY, size=count * LONGEST, dtype=np.int32).reshape(count, LONGEST)
    return [row[:length] for row, length in zip(ids, generator.integers(SHORTEST, LONGEST + 1, count), strict=True)]


def training(form: str, path: str) -> dict[str, float]:
    """Private steps on a tiny model, from the mapped file or from lists of arrays."""
    with _Watch() as watch, tempfile.TemporaryDirectory() as folder:
        tokens, units = _data(form, path)
        model, entropy = _model(), OsEntropy()
        mechanism = build("static", {"noise_multiplier": 1.0, "pairs": len(lora_pairs(model))})
        plan = TrainingPlan(BATCH / len(units), float(BATCH), STEPS, physical_batch_size=BATCH)
        header = header_of(mechanism, units, entropy, delta=HEADER["delta"])
        train(RunSpec(model, tokens, units, mechanism, plan, header), Path(folder), entropy).close()
    return watch.found()


def _data(form: str, path: str) -> tuple[Tokens, PrivacyUnits]:
    found = open_corpus(Path(path))
    if form == "mapped":
        return found.tokens, PrivacyUnits.records(len(found.tokens.rows))
    if form == "mapped by patient":
        return found.tokens, PrivacyUnits.of("patient", found.units, 4)
    rows = [row.copy() for row in found.tokens.rows]
    members = list(np.arange(len(rows))[:, None])
    return Tokens(rows, found.tokens.padding, found.tokens.width), PrivacyUnits("record", members, 1)


def _model() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return attach_lora(GPT2LMHeadModel(config).requires_grad_(False), Lora(rank=4, alpha=8, dropout=0.0), 7)


# --- draws ------------------------------------------------------------------------------------------------


def draws(count: str) -> dict[str, float]:
    """Seconds of a Poisson batch: ours, and by a coin for every unit."""
    units, rate, entropy = PrivacyUnits.records(int(count)), BATCH / int(count), OsEntropy()
    generator = np.random.default_rng()
    return {
        "ours": _median(lambda: units.draw(rate, entropy), 200),
        "mask": _median(lambda: np.flatnonzero(generator.random(int(count)) < rate), 20),
    }


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _median(work: Callable[[], object], times: int) -> float:
    return statistics.median(_seconds(work) for _ in range(times))


# --- the ledger -------------------------------------------------------------------------------------------


def charges(kind: str, path: str) -> dict[str, float]:
    """Milliseconds of a charge after 20,000 others, and of a JSON line, with and without the fsync."""
    fsync = os.fsync
    found: dict[str, float] = {}
    with _ledger(kind, path) as ledger, Path(path).with_suffix(".peer").open("wb", buffering=0) as peer:

        def ours() -> None:
            ledger.charge(_release(kind, ledger.releases))

        def theirs() -> None:
            peer.write(json.dumps({"step": ledger.releases, **_release(kind, 0).to_dict()}).encode() + b"\n")
            os.fsync(peer.fileno())

        os.fsync = lambda descriptor: None
        for _ in range(20_000):
            ours()
        found["charge"], found["json"] = _in_turn(ours, theirs, 5000)
        os.fsync = fsync
        found["charge and fsync"], found["json and fsync"] = _in_turn(ours, theirs, 1000)
    return found


def _in_turn(ours: Callable[[], object], theirs: Callable[[], object], times: int) -> list[float]:
    """Median milliseconds of each, one after the other, so that the neighbours slow both."""
    pairs = [(_seconds(ours), _seconds(theirs)) for _ in range(times)]
    return [1e3 * statistics.median(column) for column in zip(*pairs, strict=True)]


def _ledger(kind: str, path: str) -> Ledger:
    """With a budget to keep: of the plan, or of a filter."""
    planned: Composition = Counter({_release(kind, 0): 10_000_000})
    if kind == "same":
        budget = 1.01 * RunHeader("static", unit="record", units=1, **HEADER).price(planned).certified
        return Ledger.create(Path(path), _header(epsilon=budget), planned)
    renyi_filter = RenyiFilter(4.0, 1.01 * RenyiFilter(4.0, 1.0).spent(planned))
    budget = 1.01 * renyi_filter.limit(1e-5)
    return Ledger.create(Path(path), _header(epsilon=budget, renyi_filter=renyi_filter), planned)


def _header(**changes: Any) -> RunHeader:
    return RunHeader("static", unit="record", units=1, **(HEADER | changes))


def _release(kind: str, step: int) -> Release:
    """Of a fixed mechanism, or of one whose noise moves every 16 steps."""
    return Release(1e-4, 0.8) if kind == "same" else Release(1e-4, 0.8 + step // 16 * 1e-7, adaptive=True)


def verify(kind: str, path: str, lines: str) -> dict[str, float]:
    """Seconds to read, check and price a ledger of so many releases; made without its fsyncs, checked in full."""
    fsync, os.fsync = os.fsync, lambda descriptor: None
    with _ledger(kind, path) as ledger:
        for step in range(int(lines)):
            ledger.charge(_release(kind, step))
        ledger.finish()
    os.fsync = fsync
    try:
        with _Watch() as watch:
            hashed = _seconds(lambda: _sha256(Path(path)))
            start = time.perf_counter()
            contents = read_ledger(Path(path))
            read = time.perf_counter()
            priced = contents.epsilons.certified
            end = time.perf_counter()
    finally:
        Path(path).unlink()
    assert contents.releases == int(lines)
    assert contents.complete
    assert priced < float("inf")
    figures = {"kinds": len(contents.composition), "sha256": hashed, "read": read - start, "price": end - read}
    return figures | watch.found()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


PARTS: dict[str, Callable[..., dict[str, float]]] = {
    part.__name__: part for part in (corpus, training, draws, charges, verify)
}

if __name__ == "__main__":
    main()
