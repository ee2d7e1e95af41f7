"""The records as the split deals them to its sides, before any canary was planted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from dptune.core.errors import DataError
from dptune.core.plugins import load
from dptune.records.canaries import is_suffix
from dptune.records.parquet_file import Records, decode_content, form_at, read_records, secrets_in_records
from dptune.records.reading.record import Record, fingerprint
from tasks.paths import EVAL, NARRATIVES, RAW, SPLITS, TRAIN
from tasks.settings.data import Data
from tasks.settings.params import load_settings
from tasks.settings.strict import load_yaml, refusal

#: The training side without canaries: secrets that an auditor planted are nobody's records, and cost utility.
TRAIN_SIDE = SPLITS / "train.parquet"
#: What attackers know of. No candidate reads it; it is read so that a register knows the same records by another split.
ATTACK_SIDE = SPLITS / "attack.parquet"


def split_records(file: Path) -> tuple[Record, ...]:
    """The records of one file. Private, unless the file is public."""
    stored = read_records(file)
    form = form_at(stored.about)
    return tuple(
        Record(decode_content(text, form), int(unit), file.name, row)
        for row, (unit, text) in enumerate(zip(stored.unit, stored.text.to_pylist(), strict=True), start=1)
    )


def settings_of_records() -> Data:
    """Section `data` as it was when DVC made the records that lie here. params.yaml may say another since.

    Where DVC made none, params.yaml's counts.

    Raises: ConfigError as ``load_settings``; DataError if DVC was stopped between the source and the split.
    """
    own, lock = load_settings().data, Path("dvc.lock")
    stages = load_yaml(lock.read_text(encoding="utf-8"))["stages"] if lock.is_file() else {}
    if "acquire" not in stages:
        return own
    for maker, reader, path in (("acquire", "verbalize", RAW), ("verbalize", "split", NARRATIVES.parent)):
        made = _digest(stages, maker, "outs", path)
        if made is None or made != _digest(stages, reader, "deps", path):
            problem = f"was not made of {path} as it is now, so what the records are is not known"
            raise DataError(problem, fix="run `dvc repro split`, which splits them again", file=SPLITS)
    noted = stages["acquire"]["params"]["params.yaml"]
    load(noted.get("plugins") or ())  # the source may be a plug-in's
    given = {name.removeprefix("data."): value for name, value in noted.items() if name.startswith("data.")}
    content = own.model_dump(mode="json") | given
    try:
        return Data.model_validate(content)
    except ValidationError as error:
        raise refusal(error, str(lock), content, "") from None


def _digest(stages: dict[str, Any], stage: str, side: str, path: Path) -> str | None:
    """DVC's hash of what a stage made ("outs") or read ("deps"); None if it has noted none."""
    noted = {one["path"]: one.get("md5") for one in stages.get(stage, {}).get(side, [])}
    return noted.get(path.as_posix())


def split_digest() -> str:
    """The digest by which a register recognises the pipeline's records, however they are split. Private."""
    return fingerprint(record for file in (TRAIN_SIDE, EVAL, ATTACK_SIDE) for record in split_records(file))


def _same_texts(side: Records, planted: Records) -> bool:
    """Whether all texts are the split's; where records carry secrets, but for the secret at their end."""
    texts = planted.text[: len(side.record)]
    if not secrets_in_records(planted.about):
        return bool(texts.equals(side.text))
    pairs = zip(side.text.to_pylist(), texts.to_pylist(), strict=True)
    return all(one == own or (own.startswith(one) and is_suffix(own[len(one) :])) for one, own in pairs)


def records_digest() -> str:
    """The digest of the records behind what trains on data/canaries: cells and ensembles. Private.

    Raises: DataError if canaries were planted among other records than the split holds now. A register would count what
        is trained as that of the new records, and the old ones would seem to have paid less than they did.
    """
    side, planted = read_records(TRAIN_SIDE), read_records(TRAIN)
    known = len(side.record)
    own = planted.record[:known], planted.unit[:known]
    same = _same_texts(side, planted) and all(map(np.array_equal, own, (side.record, side.unit)))
    if not same or (planted.record[known:] >= 0).any():
        problem = f"was not made of {TRAIN_SIDE} as it is now: the split was made again, and the canaries were not"
        raise DataError(problem, fix="run `dvc repro canaries`, which plants them again", file=TRAIN)
    return split_digest()
