"""Puts a delivered adapter on its base model, and names that base where another one was given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open

from dptune.errors import ConfigError, first_line
from dptune.training.model import ModelSource
from dptune.tuning.places import name_of
from dptune.tuning.verifying import CONFIG, WEIGHTS

_FIELD = "model.source"


def base_of(adapter: Path) -> tuple[str, str | None]:
    """Name and revision of the model that an adapter was tuned on, as its configuration has them."""
    config = json.loads((adapter / CONFIG).read_text(encoding="utf-8"))
    return str(config.get("base_model_name_or_path")), config.get("revision")


def other_base(name: str, revision: str | None, base: ModelSource) -> tuple[str, ...]:
    """A note if the model has another name or revision than that which the adapter was tuned on; a folder may have been
    renamed, and has no revision."""
    tuned, given = _said(name, revision), _said(name_of(base.source), base.revision)
    return () if given == tuned else (f"the adapter was tuned on {tuned}, and the model is {given}",)


def check_vocabulary(adapter: Path, base: ModelSource, model: Any, tokenizer: Any) -> None:
    """Raise ConfigError if the adapter's tokenizer has tokens that the model does not know.

    Args:
        model: the base model; its weights need not be there.
    """
    count = model.get_input_embeddings().weight.shape[0]
    if (largest := max(tokenizer.get_vocab().values(), default=0)) >= count:
        raise _misfit(adapter, base, f"it knows {count} tokens, and the adapter's tokenizer has token {largest}")


def load_adapter(adapter: Path, base: ModelSource, loaded: Any) -> Any:
    """The model with all of the adapter's weights, in evaluation mode.

    Raises: ConfigError naming the model that the adapter was tuned on, if its weights do not fit ``loaded``.
    """
    try:
        model = PeftModel.from_pretrained(loaded, str(adapter)).eval()
    except ValueError as error:
        raise _misfit(adapter, base, "it lacks the adapter's layers") from error
    except RuntimeError as error:
        other_width = "size mismatch" in str(error)
        raise _misfit(adapter, base, "its layers are of other sizes" if other_width else first_line(error)) from error
    with safe_open(str(adapter / WEIGHTS), "pt") as file:
        if set(file.keys()) != set(get_peft_model_state_dict(model, save_embedding_layers=False)):
            raise _misfit(adapter, base, "it has other layers")
    return model


def _misfit(adapter: Path, base: ModelSource, why: str) -> ConfigError:
    tuned = _said(*base_of(adapter))
    problem = f"{base.source!r} does not fit the adapter, which was tuned on {tuned} ({why})"
    return ConfigError(_FIELD, problem, fix=f"give {tuned}")


def _said(name: str, revision: str | None) -> str:
    return f"{name} at {revision}" if revision else name
