"""Work: trains and scores one run, by the library's own doors; a run that was stopped goes on where it was."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dptune
from benchmarks.measure import machine, status
from benchmarks.real.data import E2E_SEPARATOR, Rows
from benchmarks.real.plan import MODELS, UNCERTIFIED, Run, chosen
from dptune.core.errors import DivergedError, DptuneError
from dptune.core.files import jsonable, read_json, write_json
from dptune.core.interrupts import ends_like_ctrl_c
from dptune.generation.decoding import Decoding
from dptune.generation.text_metrics import score
from dptune.job.base_model import open_base
from dptune.job.preparation import PreparedRun, prepare, tokens_of_side, with_labels
from dptune.job.result import PUBLIC
from dptune.job.run import Tuned, run
from dptune.job.run_spec import job_header, mechanism_of, schedule_of
from dptune.job.scoring import references_of, score_adapter
from dptune.job.settings import TuneSettings
from dptune.mechanisms.registry import of_model
from dptune.privacy.entropy import OsEntropy
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.run_header import RunHeader
from dptune.privacy.spent_budgets.register import Register
from dptune.records.benchmarks import END_OF_TEXT
from dptune.records.reading.read import read
from dptune.records.reading.source import RecordSource
from dptune.training.evaluation import record_losses
from dptune.training.models.model import ModelSource

#: Parts of the outputs that are left out in turn, for the standard error of a score of a whole set of outputs.
_PARTS = 20
_BLEU = "bleu_e2e"
_KINDS = ("published", "noise_only", "certified")
#: Floors of E2E, which need no model: one sentence for every input, and its slots in a frame.
_CONSTANT = "There is a restaurant in the riverside area."


@dataclass
class Bench:
    """Where results are kept, and on what the runs are made.

    Attributes:
        out: folder of results.jsonl, seconds.json and the runs' folders.
        data: folder of the published data.
        device: device such as cpu or cuda; None takes a GPU if there is one.
        models: where each model is, by its key in ``plan.MODELS``.
    """

    out: Path
    data: Path
    device: str | None = None
    models: Mapping[str, str] = field(default_factory=lambda: MODELS)

    @property
    def results(self) -> dict[str, dict[str, Any]]:
        """The lines of results.jsonl by the name of the run."""
        return read_results(self.out / "results.jsonl")

    @property
    def where(self) -> torch.device:
        return torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def folder(self, one: Run) -> Path:
        return self.out / "runs" / one.name

    def carry_out(self, one: Run, rows: Rows) -> dict[str, Any]:
        """Train, score and write down one run. A run that diverged is written down too: noise would differ next time.

        Raises: KeyboardInterrupt where it was stopped; ConfigError and DataError as ``tune``.
        """
        one = replace(one, named=one.name, changes=chosen(one, self.results))
        begun = time.monotonic()
        _forget_peak(self.where)
        try:
            found = self._measured(one, rows)
        except DivergedError as error:
            found = {"diverged": str(error)}
        finally:
            seconds = self._add_seconds(one, time.monotonic() - begun)
        about = {"case": one.case.name, "part": one.case.part, "title": one.case.title, "model": one.case.model}
        asked = {"budget": one.budget, "system": one.system, "seed": one.seed, "changes": dict(one.changes)}
        line = {
            "name": one.name,
            **about,
            **asked,
            **found,
            "seconds": round(seconds, 1),
            "memory": _peak(self.where),
            **self._here(),
        }
        with (self.out / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return line

    def _add_seconds(self, one: Run, more: float) -> float:
        """The seconds that a run took so far, over all the calls that it was stopped in."""
        path = self.out / "seconds.json"
        known: dict[str, float] = read_json(path) if path.exists() else {}
        known[one.name] = known.get(one.name, 0.0) + more
        write_json(path, known)
        return known[one.name]

    def _here(self) -> dict[str, Any]:
        about = machine(self.where)
        return {"device": about["kind"], "threads": about["threads"], "commit": about["commit"],
                "versions": {"dptune": version("dptune"), **about["versions"]}}  # fmt: skip

    def _measured(self, one: Run, rows: Rows) -> dict[str, Any]:
        tuned = self._tuned(one, rows)
        given, epsilons = RunFolder(tuned.folder), tuned.epsilons
        result, header = read_json(given.result), tuned.ledger.header
        base = open_base(self.models[one.case.model], self._settings(one))
        return {
            **jsonable({f"epsilon_{kind}": getattr(epsilons, kind) for kind in _KINDS}),
            "delta": header.delta,
            "unit": header.unit,
            "units": header.units,
            "settings": result["settings"],
            "noise_multiplier": result.get("noise_multiplier"),
            "base": {"name": base.name, "revision": base.revision, "parameters": base.parameters,
                     "trained": base.dimension, "weights": base.weights},
            **self._scores(one, rows, tuned),
        }  # fmt: skip

    # --- training

    def _settings(self, one: Run, **changes: Any) -> TuneSettings:
        """The settings of ``tune``: what the case fixes, and what the run changes; all else are the defaults."""
        budget = one.budget if one.budget is not None else 1.0  # a stand-in, which ``_uncertified`` drops
        return TuneSettings.of(epsilon=budget, **self._given(one), **changes)

    def _given(self, one: Run) -> dict[str, Any]:
        fixed = {name: value for name, value in one.case.settings.items() if name != "unit"}
        own = {"eval_share": 0.0, "device": str(self.where), "called": one.case.title, "seed": one.seed}
        if one.system not in UNCERTIFIED:
            own["mechanism"] = one.system
            own |= one.changes
        return {**fixed, **own, **({"physical_batch_size": one.case.gpu_rows} if self.where.type == "cuda" else {})}

    def _tuned(self, one: Run, rows: Rows) -> Tuned:
        folder, model = self.folder(one), self.models[one.case.model]
        folder.parent.mkdir(parents=True, exist_ok=True)
        source: dict[str, Any] = {**rows.columns, "unit": one.case.settings.get("unit"), "public": rows.dev}
        if one.system in UNCERTIFIED:
            return run(self._uncertified(one, rows, source), folder, Register.beside(folder, None))
        return dptune.tune(model, rows.train, epsilon=one.budget, out=folder, **source, **self._given(one))

    def _uncertified(self, one: Run, rows: Rows, source: dict[str, Any]) -> PreparedRun:
        """The run that ``tune`` would make if it took a mechanism without a certified epsilon, by the same steps.

        Its noise is what the paper's own accountant asks for at this epsilon; without privacy there is none.
        """
        settings, records = with_labels(self._settings(one), RecordSource(rows.train, **source))
        base = open_base(self.models[one.case.model], settings)
        ready = prepare(records, base, settings)  # as ``static``
        settings = replace(settings, mechanism=one.system, options=dict(one.changes.get("options", {})))
        schedule = schedule_of(settings, len(ready.units), base.parameters, base.positions, 1)
        options = of_model(one.system, schedule.options, base.pairs, base.dimension)
        mechanism = mechanism_of(settings, options, schedule.priced, "published")
        kept = {name: value for name, value in vars(ready).items() if name not in ("settings", "schedule", "mechanism")}
        return _Uncertified(settings=settings, schedule=schedule, mechanism=mechanism, **kept)

    # --- scores on the test file

    def _scores(self, one: Run, rows: Rows, tuned: Tuned) -> dict[str, Any]:
        """Scores by name, each with its standard error, and the floors; of records that nobody trained on."""
        dev = tuned.scores.get(PUBLIC) or {"perplexity": tuned.perplexity[PUBLIC]}
        found: dict[str, Any] = {"dev": {name: list(pair) for name, pair in dev.items()}}
        if "prompt" not in rows.columns and one.case.settings.get("task") != "classify":
            return found | self._perplexities(one, rows, tuned)
        outputs: dict[str, str] = {}
        base = ModelSource(self.models[one.case.model], None, "bfloat16" if self.where.type == "cuda" else "float32")
        source = RecordSource(rows.test, **rows.columns)
        decoding = None if one.case.settings.get("task") == "classify" else Decoding(one.case.new_tokens)
        scored = score_adapter(RunFolder(tuned.folder).adapter, base, source, decoding=decoding, device=str(self.where),
                               rows=self._rows(one), warn=lambda note: None, keep=outputs.update)  # fmt: skip
        figures = scored.figures
        if one.case.settings.get("task") == "classify":
            error = math.sqrt(figures["accuracy"] * (1 - figures["accuracy"]) / scored.inputs)
            scores = {name: [value, None] for name, value in figures.items() if name != "largest_class"}
            scores["accuracy"] = [figures["accuracy"], error]
            constant = {"accuracy": figures["largest_class"]}
            return found | {"scores": scores, "tested": scored.inputs, "floors": {"a constant answer": constant}}
        references = references_of(read(source))
        scores = {name: [value, None] for name, value in figures.items()}
        written = [outputs[prompt] for prompt in references]
        scores[_BLEU] = [figures[_BLEU], _leaving_out(written, list(references.values()))]
        without_model = {
            "a constant answer": [_CONSTANT] * len(references),
            "a slot template": map(template, references),
        }
        floors = {who: {_BLEU: _bleu(list(texts), references)} for who, texts in without_model.items()}
        return found | {"scores": scores, "tested": scored.inputs, "signatures": scored.signatures, "floors": floors}

    def _perplexities(self, one: Run, rows: Rows, tuned: Tuned) -> dict[str, Any]:
        """Perplexity of the test texts, with the adapter and without, as ``tune`` reads and counts them."""
        base, settings = open_base(self.models[one.case.model], self._settings(one)), self._settings(one)
        records = read(RecordSource(rows.test, **rows.columns))
        tokens = tokens_of_side(records, base.tokenizer, settings.max_length or 0, settings)
        assert tokens is not None
        after = record_losses(tuned.model, tokens, self._rows(one), label="scoring")
        with tuned.model.disable_adapter():
            before = record_losses(tuned.model, tokens, self._rows(one), label="scoring the untuned model")
        floors = {"the untuned model": {"perplexity": _perplexity(*before)[0]}}
        return {"scores": {"perplexity": _perplexity(*after)}, "tested": len(records), "floors": floors}

    def _rows(self, one: Run) -> int:
        return one.case.gpu_rows if self.where.type == "cuda" else 16


class _Uncertified(PreparedRun):
    """A run whose ledger keeps to the paper's epsilon, or to none; no certified epsilon is checked or claimed."""

    @property
    def header(self) -> RunHeader:
        settings = self.settings
        if self.settings.mechanism == "nonprivate":
            settings = replace(settings)
            object.__setattr__(settings, "epsilon", None)
        return job_header(settings, self.mechanism, self.units, OsEntropy(), self.schedule.priced, "published")


def _perplexity(losses: Any, counts: Any) -> list[float]:
    """exp of the mean loss of a token, and its standard error over records (a ratio's, by the delta method)."""
    mean = losses.sum() / counts.sum()
    spread = math.sqrt(float(np.square(losses - mean * counts).sum())) / float(counts.sum())
    value = math.exp(mean)
    return [value, value * spread]


def _bleu(outputs: Sequence[str], references: Mapping[str, Sequence[str]]) -> float:
    return score(list(outputs), list(references.values()), [_BLEU])[_BLEU].value


def _leaving_out(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> float | None:
    """Standard error of BLEU by the jackknife: one of ``_PARTS`` parts of the outputs is left out in turn."""
    if len(outputs) < 2 * _PARTS:
        return None
    left = [
        score([one for n, one in enumerate(outputs) if n % _PARTS != part],
              [one for n, one in enumerate(references) if n % _PARTS != part], [_BLEU])[_BLEU].value
        for part in range(_PARTS)
    ]  # fmt: skip
    return math.sqrt((_PARTS - 1) * float(np.var(left)))


def template(prompt: str) -> str:
    """A prompt's slots in one frame, which repeats the meaning without a model.

    >>> template("name : Ada | Type : pub | food : French | near : The Bay\\nDescription:")
    'Ada is a French pub near The Bay.'
    >>> template("name : Ada | Type : pub | food : French | near : The Bay<|endoftext|>")
    'Ada is a French pub near The Bay.'
    """
    meaning = prompt.removesuffix(E2E_SEPARATOR).removesuffix(END_OF_TEXT)
    slots = dict(part.strip().split(" : ", 1) for part in meaning.split(" | ") if " : " in part)
    said = f"{slots.get('name', '')} is a {slots.get('food', '')} {slots.get('Type') or 'restaurant'}"
    said += f" in the {slots['area']} area" if "area" in slots else ""
    said += f" near {slots['near']}" if "near" in slots else ""
    return " ".join(f"{said}.".split())


def _forget_peak(device: torch.device) -> None:
    """Let the peak of the memory count from here on, where the system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif (reset := Path("/proc/self/clear_refs")).exists():
        reset.write_text("5")


def _peak(device: torch.device) -> float:
    """Peak memory in MiB: the GPU's, or the process's."""
    return round(torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else status("VmHWM"), 1)


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Lines of a file of results by the name of the run; a line that was cut off by a crash counts as not run."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            one = json.loads(line)
        except ValueError:
            continue
        found[one["name"]] = one
    return found


@contextmanager
def stops_after(minutes: float) -> Iterator[None]:
    """Context that SIGTERM interrupts after so many minutes: a run stops at the end of its step, with a checkpoint."""
    timer = threading.Timer(60 * minutes, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    with ends_like_ctrl_c():
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def carry_out_all(
    bench: Bench, runs: Sequence[Run], minutes: float, say: Callable[[str], None] = print
) -> tuple[int, list[str]]:
    """Carry out what is missing, in order, until the time is over.

    Returns: how many runs were finished, and what went wrong in others, which the next call tries again.
    """
    bench.out.mkdir(parents=True, exist_ok=True)
    done, failed, loaded = 0, [], {}
    try:
        with stops_after(minutes):
            for one in runs:
                if one.name in bench.results:
                    continue
                if one.case.name not in loaded:
                    loaded = {one.case.name: one.case.read(bench.data)}  # of one case at a time
                try:
                    line = bench.carry_out(one, loaded[one.case.name])
                except DptuneError as error:
                    failed.append(f"{one.name}: {error}")
                    say(failed[-1])
                    continue
                done += 1
                say(f"{one.name}: {line.get('scores') or line['diverged']} in {line['seconds']:.0f} s")
    except KeyboardInterrupt:
        say("Stopped; the same command goes on from here.")
    return done, failed
