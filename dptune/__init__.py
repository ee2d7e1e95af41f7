"""dptune: differentially private fine-tuning of language models, with honest epsilons.

Layers, each importing only those to its right: ``cli -> audit -> job -> training -> mechanisms -> privacy -> core``;
``records`` stands alone. ``dptune.tune``, ``dptune.sample`` and ``dptune.model_folder`` are
imported at their first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dptune.moved import keep_former_names

if TYPE_CHECKING:
    from dptune.job.sampling import sample as sample
    from dptune.job.tune import tune as tune
    from dptune.training.models.model_source import model_folder as model_folder

__version__ = "0.1.0"
keep_former_names()


_FUNCTIONS = {
    "tune": "dptune.job.tune",
    "sample": "dptune.job.sampling",
    "model_folder": "dptune.training.models.model_source",
}


def __getattr__(name: str) -> Any:
    """The functions of ``_FUNCTIONS``, which need torch and transformers."""
    if name not in _FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_FUNCTIONS[name]), name)
