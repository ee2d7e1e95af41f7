"""A trained hyper-policy on disk: policy.safetensors and policy.json, which records the releases that it cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dptune.core.errors import ConfigError
from dptune.core.files import read_json, replacing, sha256, write_json
from dptune.core.settings import RECORD
from dptune.privacy.release import Composition, Release

_FORMAT = 3
_RECORD_BEFORE = "encounter"  # what policies call a record that were saved with ledgers of format 5
_JSON, _TENSORS = "policy.json", "policy.safetensors"
#: A unit of privacy: a set of whole units, whose one trajectory is a complete fine-tuning run.
TENANT = "tenant"
#: Units that are in one tenant only: tenants get whole patients of a cohort, each with all records.
_WHOLE_IN_A_TENANT = (RECORD, "patient")


@dataclass(frozen=True)
class SavedPolicy:
    """A hyper-policy and its price.

    A run that starts from it depends on the records of the run that trained it. Whether those are its own records
    cannot be known from here, so their releases count as if they were.

    Attributes:
        label: label of the run that trained it.
        run_id: id of that run's ledger.
        unit: unit of privacy of that run's releases ("record", a column's name, "client", "tenant").
        tensors: networks ("policy.*") and feature statistics ("features.*").
        features: number of features that it reads (agent linear: of a pair).
        features_seen: observations behind the feature statistics.
        releases: everything that was charged for it, its own ancestors' releases included.
        leaks: reasons why that run has no certified epsilon; empty if it has one.
        options: the controller's options, for information.
    """

    label: str
    run_id: str
    unit: str
    tensors: dict[str, Any]
    features: int
    features_seen: int
    releases: Composition
    leaks: tuple[str, ...]
    options: dict[str, Any]

    @property
    def price(self) -> Composition:
        """The releases that one unit of a run pays when the run starts from this policy.

        The releases as they are, if their unit is the run's. A tenant's are for a tenant whose slot is *zeroed*. A
        record (or unit) that leaves turns its tenant's bounded contribution into *another* one, which is up to twice
        as far: sensitivity 2, whatever happened inside the tenant (its coins and noise can be taken as given, for both
        tenants the same).
        """
        if self.unit != TENANT:
            return Counter(self.releases)
        return Counter(
            {replace(release, sensitivity=2 * release.sensitivity): n for release, n in self.releases.items()}
        )

    def write(self, folder: Path) -> None:
        """Write both files into ``folder``. They are as public as the releases, unless the policy leaks."""
        from safetensors.torch import save_file

        with replacing(folder / _TENSORS) as temporary:
            save_file({key: value.contiguous() for key, value in self.tensors.items()}, temporary)
        description = {
            "format": _FORMAT,
            "label": self.label,
            "run_id": self.run_id,
            "unit": self.unit,
            "sha256": sha256(folder / _TENSORS),
            "features": self.features,
            "features_seen": self.features_seen,
            "releases": [[release.to_dict(), count] for release, count in self.releases.items()],
            "leaks": list(self.leaks),
            "options": self.options,
        }
        write_json(folder / _JSON, description)

    @classmethod
    def read(cls, folder: str) -> SavedPolicy:
        """Read both files of a folder. Raises ConfigError if one is missing or damaged."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            values = read_json(Path(folder) / _JSON)
            if values.pop("format") != _FORMAT:
                raise ValueError("another format")
            releases: Composition = Counter()
            for described, count in values.pop("releases"):
                if not isinstance(count, int) or count < 1:
                    raise ValueError(f"{count!r} is not a count")
                releases[Release.from_dict(described)] += count
            if not releases:
                raise ValueError("it cost nothing")
            if values["unit"] == _RECORD_BEFORE:
                values["unit"] = RECORD
            leaks = values.pop("leaks")
            if not (isinstance(leaks, list) and all(isinstance(leak, str) for leak in leaks)):
                raise ValueError("leaks is not a list of reasons")
            if values.pop("sha256") != sha256(Path(folder) / _TENSORS):
                raise ValueError(f"{_TENSORS} is not the file that {_JSON} describes")
            tensors = load_file(Path(folder) / _TENSORS)
            return cls(tensors=tensors, releases=releases, leaks=tuple(leaks), **values)
        except (OSError, SafetensorError, ConfigError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                "init_from", f"{folder} holds no saved hyper-policy ({error})", fix="give a finished run's controller/"
            ) from None


def fits_unit(unit: str, run_unit: str) -> bool:
    """Whether the price of a hyper-policy for ``unit`` bounds its price for a run's unit.

    The same, or a record or unit of a tenant. A client's units may be in many tenants, and those of
    another column too.
    """
    return unit == run_unit or (unit == TENANT and run_unit in _WHOLE_IN_A_TENANT)
