"""``dptune.tune``: makes an adapter with its proof from records and a model, by one run or by a search."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dptune.job.base_model import open_base
from dptune.job.path_checks import check_data, check_folder
from dptune.job.preparation import PreparedRun, prepare, with_labels
from dptune.job.run import Tuned, paid_before, run, run_here, working_in
from dptune.job.search.rehearsal import rehearsed
from dptune.job.search.search import prepare_search
from dptune.job.search.search import search as search_best
from dptune.job.search.settings import SearchSettings
from dptune.job.settings import TuneSettings
from dptune.privacy.spent_budgets.register import Register
from dptune.records.reading.source import Data, RecordSource

_log = logging.getLogger(__name__)


def tune(
    model: Any,
    records: Data,
    *,
    epsilon: float,
    delta: float | None = None,
    unit: str | None = None,
    tokenizer: Any = None,
    revision: str | None = None,
    text: str | None = None,
    prompt: str | None = None,
    completion: str | None = None,
    messages: str | None = None,
    template: str | None = None,
    label: str | None = None,
    id: str | None = None,
    public: Data | None = None,
    out: str | Path | None = None,
    search: str | Path | Mapping[str, Any] | None = None,
    candidates: float | None = None,
    register: str | Path | None = None,
    **settings: Any,
) -> Tuned:
    """Fine-tune LoRA adapters, or the model's own weights (``train``), and to classify a head or by label words, with
    differential privacy.

    Guarantee: ``result.epsilons.certified`` at ``delta`` covers the weights of ``result.model`` and the folder that
    ``save`` writes, for adding or removing one unit. Private: ``records``. Public: everything else, the number of
    training units and the names of the labels included. Under ``telemetry="research"``, the default, the result also
    holds the perplexity (of a classifier: the scores) of held-out private records, which no epsilon covers, and which
    is not in that folder; ``telemetry="private"`` does not compute it and holds nobody out.

    Args:
        model: a folder, a GGUF file, ``package:NAME`` (an installed package that holds a model), a hub id with
            ``revision``, or a transformers model with its ``tokenizer``; the latter is frozen, and gets no adapters
            itself.
        records: a path, a list of dicts, a ``datasets.Dataset``, a ``pandas.DataFrame`` or a ``pyarrow.Table``.
        delta: None takes a power of ten at or below 1 / (10 x units).
        unit: column whose values are protected as a whole; None protects single records.
        text, prompt, completion, messages, template, label: columns of the record, see ``RecordSource``; None finds
            them.
        id: column of the records' own ids, which must be distinct.
        public: records of nobody, for perplexity and for mechanisms that follow it.
        out: folder of the run, to resume it from; None takes a temporary one.
        search: a space of settings, a YAML file or a mapping, see ``job.search.settings.SearchSettings``. The best
            of a random number of candidates is released, and the budget covers the whole search.
        candidates: how many to try on average; it goes before the file's own number.
        register: file that knows what was published from which records; None takes spent.jsonl beside ``out``, and
            without ``out`` one that nobody reads again.
        settings: further fields of ``TuneSettings``, such as ``mechanism``, ``epochs``, ``telemetry``, or
            ``task="classify"`` with all ``labels``, such as ``("0", "1")``; ``words={"0": " poor", "1": " great"}``
            names them too, and takes the place of a head.

    Raises: ConfigError and DataError before anything is charged; LedgerError, CheckpointError, DivergedError later.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import mkdtemp
        >>> from dptune import tune
        >>> from dptune.training.models.pretrain import Pretraining, pretrain
        >>> folder, public = Path(mkdtemp()), [f"Parcel {n} is late." for n in range(100)]
        >>> size = {"vocabulary": 300, "layers": 1, "width": 8, "heads": 1, "max_length": 16}
        >>> tiny = Pretraining(**size, epochs=1, batch_size=50, learning_rate=0.01)
        >>> _ = pretrain(public, public, tiny, folder / "base")  # your own checkpoint goes here
        >>> rows = [{"customer": n % 50, "text": f"Order {n} is late."} for n in range(200)]
        >>> tuned = tune(folder / "base", rows, epsilon=4, unit="customer", epochs=1, out=folder / "run")
        >>> tuned.epsilons.certified <= 4, tuned.ledger.complete
        (True, True)
        >>> (tuned.save(folder / "to hand on") / "ledger.jsonl").exists()
        True
    """
    chosen = TuneSettings.of(epsilon=epsilon, delta=delta, **settings)
    source = RecordSource(
        records,
        text=text,
        prompt=prompt,
        completion=completion,
        messages=messages,
        template=template,
        label=label,
        id=id,
        unit=unit,
        public=public,
    )
    check_data(source)
    if search is not None:
        chosen.check_search()
    chosen, source = with_labels(chosen, source)
    base = open_base(model, chosen, revision, tokenizer)
    base.check_memory()
    folder = Path(out) if out is not None else Path(tempfile.mkdtemp(prefix="dptune-")) / "tuned"
    asked = None if search is None else SearchSettings.of(search, candidates=candidates)
    check_folder(folder, "run" if asked is None or asked.score.on == "rehearsal" else "search")
    book = Register.beside(folder, register)
    if asked is None:
        prepared = prepare(source, base, chosen)
        _warn(prepared, folder, book)
        return run(prepared, folder, book)
    if asked.score.on == "rehearsal":
        units = len(prepare(source, base, chosen).units)
        with working_in(folder):  # of two calls at once, the later rehearsal would replace that of the earlier's run
            found = rehearsed(source, base, chosen, asked, units, folder)
            prepared = prepare(source, base, found.settings)
            _warn(prepared, folder, book)
            return run_here(prepared, folder, book)
    return search_best(prepare_search(source, base, chosen, asked), asked, folder, book)


def _warn(prepared: PreparedRun, out: Path, register: Register) -> None:
    for warning in (*prepared.notes, *paid_before(register, prepared, out)):
        _log.warning("%s", warning)
