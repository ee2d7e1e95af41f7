"""Puts delivered weights on their base model, and names that base where another one was given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import PeftModel, get_peft_model_state_dict

from dptune.core.errors import ConfigError, first_line
from dptune.job.delivery.weights import BASE, CHECKPOINT, LORA, NO_DIGEST, base_of, form_within, read_base, weights_file
from dptune.training.models.model import ModelSource, frozen_fingerprint, fuse_activations
from dptune.training.models.model_names import name_of
from dptune.training.models.weight_files import digest_of_weights, read_tensors

_FIELD = "model.source"
#: How the numbers of a model that was given from Python can be had again, by how they were held there.
_HELD = {"float32": "dtype float32", "bfloat16": "dtype bfloat16", "4 bits": "load_in_4bit"}


def check_base(adapter: Path, base: ModelSource, loaded: Any = None) -> tuple[str, ...]:
    """Check that a model is the one that the deliverable names, whatever it is called.

    Args:
        loaded: the model of ``base`` in memory; None before it is loaded, when what is not downloaded yet passes.

    Returns: notes of what cannot be compared, for a deliverable without a digest.

    Raises: ConfigError naming both digests, for other weights or another configuration.
    """
    named, held = read_base(adapter), "4 bits" if base.load_in_4bit else base.dtype
    if named is None or named.sha256 is None or named.in_memory not in (None, *_HELD):
        tuned, given = _said(*base_of(adapter)), _said(name_of(base.source), base.revision)
        if given != tuned:
            return (f"the adapter was tuned on {tuned}, and the model is {given}",)
        # A commit's files are its own; a folder may hold any.
        return () if base.revision else (f"{given} was not compared with the model that was tuned: {NO_DIGEST}",)
    if named.in_memory not in (None, held):
        problem = f"is {held}, and the adapter was tuned on a model given from Python in {named.in_memory}"
        fix = f"give {_HELD[named.in_memory]}, in which they can be compared"
        raise ConfigError("dtype", problem, fix=fix)
    if named.in_memory is None:
        found = digest_of_weights(base.source, base.revision)
    else:
        found = None if loaded is None else frozen_fingerprint(loaded)
    if found != named.sha256 and (found is not None or loaded is not None):
        of = "numbers in memory" if named.in_memory else "configuration and weights"
        own = "no digest" if found is None else f"SHA-256 {found}"
        raise _misfit(adapter, base, f"its {of} have {own}, and those that {BASE} names {named.sha256}")
    return ()


def check_vocabulary(adapter: Path, base: ModelSource, model: Any, tokenizer: Any) -> None:
    """Raise ConfigError if the adapter's tokenizer has tokens that the model does not know.

    Args:
        model: the base model; its weights need not be there.
    """
    count = model.get_input_embeddings().weight.shape[0]
    if (largest := max(tokenizer.get_vocab().values(), default=0)) >= count:
        raise _misfit(adapter, base, f"it knows {count} tokens, and the adapter's tokenizer has token {largest}")


def load_adapter(adapter: Path, base: ModelSource, loaded: Any) -> Any:
    """The model with all of the delivered weights, in evaluation mode.

    Raises: ConfigError naming the model that they were tuned on, if ``loaded`` is another, or of other layers.
    """
    check_base(adapter, base, loaded)
    names = set(read_tensors(weights_file(adapter), fix="take the whole folder that was delivered"))
    is_adapter = form_within(adapter) in (None, LORA)
    try:
        model = with_trained(loaded, adapter)
    except ValueError as error:
        raise _misfit(adapter, base, "it lacks the adapter's layers" if is_adapter else first_line(error)) from error
    except RuntimeError as error:
        other_width = "size mismatch" in str(error)
        raise _misfit(adapter, base, "its layers are of other sizes" if other_width else first_line(error)) from error
    if is_adapter and names != set(get_peft_model_state_dict(model, save_embedding_layers=False)):
        raise _misfit(adapter, base, "it has other layers")
    return model


def with_trained(loaded: Any, folder: Path) -> Any:
    """The frozen base model with the weights that a run wrote to a folder, in evaluation mode.

    Args:
        loaded: the base model, a classifier for a classifier's weights. Adapters and changed weights go into it; of a
            whole checkpoint another model is loaded.

    Raises: ValueError for weights that the model lacks, or lacks in its file; RuntimeError for other shapes.
    """
    if weights_file(folder).name == LORA.weights:
        return PeftModel.from_pretrained(loaded, str(folder)).requires_grad_(False).eval()
    if weights_file(folder).name == CHECKPOINT.weights:
        device, like = loaded.device, loaded.dtype
        model, report = type(loaded).from_pretrained(
            str(folder),
            dtype=like,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        if missing := sorted(map(str, report["missing_keys"])):
            raise ValueError(f"its checkpoint lacks {missing[0]}")
        return fuse_activations(model.to(device)).requires_grad_(False).eval()
    _, unexpected = loaded.load_state_dict(read_tensors(weights_file(folder)), strict=False)
    if unexpected:
        raise ValueError(f"it has no weight {sorted(unexpected)[0]}")
    return loaded.requires_grad_(False).eval()


def _misfit(adapter: Path, base: ModelSource, why: str) -> ConfigError:
    tuned = _said(*base_of(adapter))
    if _said(name_of(base.source), base.revision) == tuned:
        problem = f"{base.source!r} is not the {tuned} that the adapter was tuned on, though it is called so ({why})"
        return ConfigError(_FIELD, problem, fix=f"give the folder {tuned} with the files that it had when it was tuned")
    problem = f"{base.source!r} does not fit the adapter, which was tuned on {tuned} ({why})"
    return ConfigError(_FIELD, problem, fix=f"give {tuned}")


def _said(name: str, revision: str | None) -> str:
    return f"{name} at {revision}" if revision else name
