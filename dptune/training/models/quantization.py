"""Frozen weights in 4 bits, as QLoRA has them: bitsandbytes' NF4 for linear layers, all but the output layer.

The base is public and frozen in whatever bits it is held; adapters, per-sample gradients, clipping and noise stay in
float32 and float64. So the guarantee of a run is the same; only the function that adapters are added to is rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Protocol

import torch

from dptune.core.errors import ConfigError

#: Quantisation of a checkpoint that can be trained on: transformers' name of the method, and its switch.
METHOD, SWITCH = "bitsandbytes", "load_in_4bit"
#: bitsandbytes' attribute of a layer whose weights it may repack.
_REPACKS = "support_avx512bf16_for_cpu"
#: Bytes of a weight in 4 bits: half a byte, and 4 for the scale of each block of 64.
BYTES_EACH = 0.5 + 4 / 64


class _Source(Protocol):
    @property
    def source(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def load_in_4bit(self) -> bool: ...


def in_4bit(base: _Source, config: Any) -> bool:
    """Whether the weights are to be held in 4 bits: because it is asked for, or because the checkpoint's are."""
    return base.load_in_4bit or method_of(config) is not None


def method_of(config: Any) -> str | None:
    """The method that a checkpoint is quantised by, with "(4 bit)" where that is so; None if it is not quantised."""
    stored = getattr(config, "quantization_config", None)
    if not stored:
        return None
    read = stored.get if isinstance(stored, Mapping) else lambda name: getattr(stored, name, None)
    method = str(getattr(read("quant_method"), "value", read("quant_method")))
    return f"{method} (4 bit)" if read(SWITCH) else method


def is_trainable(config: Any) -> bool:
    """Whether adapters can be trained on the checkpoint as it is quantised, or not."""
    return method_of(config) in (None, f"{METHOD} (4 bit)")


def check_library() -> None:
    """Raises: ConfigError unless bitsandbytes is installed."""
    if find_spec(METHOD) is None:
        problem = f"needs the library {METHOD}, which is not installed"
        raise ConfigError(f"model.{SWITCH}", problem, fix="pip install 'dptune[quantized]', or leave it off")


def loading_options(base: _Source, device: torch.device) -> dict[str, Any]:
    """Options of ``from_pretrained`` for weights in 4 bits; a checkpoint that holds such weights keeps its own."""
    from transformers import BitsAndBytesConfig

    if not base.load_in_4bit:
        return {"device_map": {"": device}}
    compute = getattr(torch, base.dtype)
    chosen = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)
    return {"device_map": {"": device}, "quantization_config": chosen}


def keep_layout(model: Any) -> Any:
    """Keep weights in 4 bits as they were read: the model itself.

    On some CPUs bitsandbytes repacks them at the first pass in evaluation mode, and rounds their scales. The base would
    then be another function after its first evaluation, and its checksum another.

    Raises: ConfigError for a model whose weights were repacked already, or are in 4 bits by its configuration alone.
    """
    for module in model.modules():
        if hasattr(module, _REPACKS):
            state = getattr(module.weight, "quant_state", None)
            if state is None:
                problem = "holds whole weights, and its config.json says that they are in 4 bits"
                fix = "take quantization_config out of config.json, and use model.load_in_4bit"
                raise ConfigError("model.source", problem, fix=fix)
            if getattr(state, "packing_format_for_cpu", False):
                problem = "has weights in 4 bits that bitsandbytes repacked, and rounded, at its first pass on this CPU"
                raise ConfigError(
                    "model", problem, fix="load it again, and give it to dptune before its first forward pass"
                )
            setattr(module, _REPACKS, False)
    return model


def states_of(parameter: torch.Tensor) -> list[torch.Tensor]:
    """The tensors by which weights in 4 bits become numbers; none for other weights.

    Scales may be in 8 bits themselves: then they have scales, an offset and a table of their own.
    """
    state = getattr(parameter, "quant_state", None)
    of_scales = getattr(state, "state2", None)
    found = [getattr(state, name, None) for name in ("absmax", "code", "offset")]
    found += [getattr(of_scales, name, None) for name in ("absmax", "code")]
    return [one for one in found if isinstance(one, torch.Tensor)]
