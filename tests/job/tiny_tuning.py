"""A tiny checkpoint with a tokenizer that knows chats, and records of customers."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import tiny_ensemble

from dptune.job.delivery.deliverable import write_card
from dptune.job.delivery.verification import LABELS
from dptune.job.delivery.weights import BASE
from dptune.job.result import RunResult

#: What a run of a second or two needs.
QUICK: dict[str, Any] = {"epochs": 2, "expected_batch_size": 8, "rank": 2, "target_modules": ("c_attn",)}
CHAT = (
    "{% for message in messages %}{{ message['content'] }}{% if message['role'] == 'assistant' %}{{ eos_token }}"
    "{% endif %}{% endfor %}"
)


@lru_cache(maxsize=1)
def checkpoint() -> Path:
    """The folder of a model of 24 positions, whose tokenizer pads with nothing of its own."""
    folder = Path(mkdtemp(prefix="dptune tiny tune ")) / "tiny"
    shutil.copytree(tiny_ensemble.base().source, folder)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": CHAT}))
    return folder


def as_earlier(adapter: Path, folder: Path) -> Path:
    """A copy as versions delivered it that named no digest of the base; a text model's."""
    copy = Path(shutil.copytree(adapter, folder))
    (copy / BASE).unlink()
    write_card(copy, RunResult({}, {}, base="tiny", task="classify" if (copy / LABELS).exists() else "generate"))
    return copy


def rows(count: int = 40, customers: int = 20) -> list[dict[str, Any]]:
    """Records of customers, the texts distinct."""
    texts = tiny_ensemble.texts(count, 5)
    return [{"customer_id": f"c{n % customers}", "text": f"{n} {text}"} for n, text in enumerate(texts)]


def write_csv(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    listed = list(records)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(listed[0]))
        writer.writeheader()
        writer.writerows(listed)
    return path


def write_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
