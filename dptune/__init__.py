"""dptune: differentially private fine-tuning of language models, with honest epsilons.

Layers, each importing only those to its right:
``tuning -> training -> mechanisms -> privacy``; ``corpus`` stands alone. ``dptune.tune`` is imported at its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dptune.tuning.tune import tune as tune

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """``tune``, which needs torch and transformers."""
    if name != "tune":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("dptune.tuning.tune").tune
