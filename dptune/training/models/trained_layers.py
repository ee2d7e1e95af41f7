"""Trained layers: the target modules of LoRA, checked by name, and classification heads, which train in full."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TARGET_MODULES
from peft.utils import ModulesToSaveWrapper
from transformers.pytorch_utils import Conv1D

from dptune.core.errors import ConfigError
from dptune.core.settings import Lora

_LINEAR = (torch.nn.Linear, Conv1D)
#: Names that families give to their query and value projections, or to those of all three in one layer. A family that
#: PEFT's own table lacks gets the first of which it has all, as PEFT gives it to that family's kin.
_ATTENTION = (
    *(("q_proj", "v_proj"), ("query", "value"), ("q_lin", "v_lin")),
    *(("qkv_proj",), ("query_key_value",), ("Wqkv",), ("c_attn",)),
)
#: The layer of a classifier by label words that holds the words' rows of the output layer: frozen, as those are.
_WORDS_LAYER = "score"
#: The layer that PEFT does not adapt in some families, whose kernels read its weight themselves.
_REFUSED, _MAMBA = "out_proj", ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")


def lora_targets(model: Any, lora: Lora) -> list[str] | str:
    """The target modules to give to PEFT, each checked: PEFT ignores an unknown name if another one is known.

    Of a model of texts and images, whole names of the text model's layers: its towers have layers of the same names,
    which no text reaches.

    Raises: ConfigError naming the layers that there are.
    """
    family, layers = model.config.model_type, text_modules(model)
    targets = lora.target_modules or TARGET_MODULES.get(family) or _attention(layers)
    if targets is None:
        problem = f"not known for model type {family!r}"
        raise ConfigError(
            "lora.target_modules", problem, fix=layers_to_name(linear_layers(model), model.config.model_type)
        )
    whole = model.config.get_text_config() is model.config
    if targets in ("all-linear", ("all-linear",)):
        return "all-linear" if whole else linear_layers(model)
    if isinstance(targets, str):
        # PEFT's own expression for a family is not checked.
        matched = _matched(layers, targets, check=lora.target_modules is not None)
    else:
        for target in targets:
            if not any(f".{name}".endswith(f".{target}") for name in layers):
                problem = f"no layer is called {target!r}"
                raise ConfigError(
                    "lora.target_modules", problem, fix=layers_to_name(linear_layers(model), model.config.model_type)
                )
        matched = [name for name in layers if any(f".{name}".endswith(f".{target}") for target in targets)]
    if lora.target_modules is not None:
        _refuse_tied_output(model, matched)
    return matched if not whole else targets if isinstance(targets, str) else list(targets)


def text_modules(model: Any) -> dict[str, torch.nn.Module]:
    """Modules by name that a text may reach: of a model of texts and images, its text model and its output layer."""
    modules = dict(model.named_modules())
    if model.config.get_text_config() is model.config:
        return modules
    decoder, output = model.get_decoder(), model.get_output_embeddings()
    prefix = next((f"{name}." for name, module in modules.items() if module is decoder and name), "")
    return {name: module for name, module in modules.items() if name.startswith(prefix) or module is output}


def linear_layers(model: Any) -> list[str]:
    """Whole names of the linear layers that a text reaches, in model order, without the output layer."""
    output = model.get_output_embeddings()
    return [n for n, module in text_modules(model).items() if isinstance(module, _LINEAR) and module is not output]


def said_share(model: Any, adapted: Sequence[str], linear: Sequence[str]) -> str:
    """How many of a model's layers are adapted, in words: "2 of 26 linear layers (q_proj, v_proj), in 1 of 4 ...".

    Args:
        adapted, linear: whole names of the layers with an adapter, and of all linear ones.
    """
    inner = {found[0] for name in adapted if (found := re.match(r".*?\.\d+(?=\.)", name))}
    kinds = ", ".join(sorted({name.rpartition(".")[2] for name in adapted}))
    config = model.config.get_text_config()
    of_text = "" if config is model.config else " of the text model"
    whole = f"{len(adapted)} of {len(linear)} linear layers{of_text} ({kinds})"
    return f"{whole}, in {len(inner)} of {config.num_hidden_layers} transformer layers"


def _refuse_tied_output(model: Any, adapted: Collection[str]) -> None:
    """Raise ConfigError if the output layer is adapted and its weight is the embeddings' too.

    A merged adapter would move the embeddings too, and the merged model would be another one than was trained.

    Args:
        adapted: whole names of the layers that get an adapter.
    """
    output = model.get_output_embeddings()
    if output is None or output.weight is not model.get_input_embeddings().weight:
        return
    name = next(name for name, module in model.named_modules() if module is output)
    if name in adapted:
        problem = f"include {name!r}, which shares its weight with the embeddings: a merged adapter would move both"
        raise ConfigError(
            "lora.target_modules",
            problem,
            fix=f"leave it out; {layers_to_name(linear_layers(model), model.config.model_type)}",
        )


def _attention(layers: Mapping[str, torch.nn.Module]) -> tuple[str, ...] | None:
    """The names of query and value projections in a model of any family; None where it has none of those known."""
    linear = {name.rpartition(".")[2] for name, module in layers.items() if isinstance(module, _LINEAR)}
    return next((names for names in _ATTENTION if linear.issuperset(names)), None)


def beside_words(model: Any, targets: list[str] | str) -> list[str] | str:
    """The target modules without the words' layer, which PEFT takes for any other linear layer.

    Raises: ConfigError if they name it.
    """
    if targets == "all-linear":
        return [name for name, one in model.named_modules() if isinstance(one, _LINEAR) and name != _WORDS_LAYER]
    if re.fullmatch(targets, _WORDS_LAYER) if isinstance(targets, str) else _WORDS_LAYER in targets:
        problem = f"include {_WORDS_LAYER!r}, the label words' rows of the output layer, which stay frozen"
        raise ConfigError("lora.target_modules", problem, fix="leave it out")
    return targets


def _matched(layers: Mapping[str, torch.nn.Module], expression: str, *, check: bool) -> list[str]:
    """Layers whose whole name a regular expression matches.

    Raises: ConfigError, to ``check``, if it is none, or matches no linear layer.
    """
    try:
        compiled = re.compile(expression)
    except re.error as error:
        raise ConfigError(
            "lora.target_modules", f"{expression!r} is not a regular expression ({error})", fix="mend it"
        ) from None
    matched = [name for name in layers if compiled.fullmatch(name)]
    other = next((name for name in matched if not isinstance(layers[name], _LINEAR)), None)
    if check and (other is not None or not matched):
        problem = f"as a regular expression of whole names, {expression!r} matches "
        problem += f"{other}, which is not a linear layer" if other is not None else "no layer"
        example = next(name for name, module in layers.items() if isinstance(module, _LINEAR))
        fix = f"match whole names such as {example}, or give a list of names, or all-linear"
        raise ConfigError("lora.target_modules", problem, fix=fix)
    return matched


def layers_to_name(linear: Sequence[str], family: str) -> str:
    """A fix that lists the layers which may be named.

    Args:
        linear: whole names of the linear layers, as they are before PEFT wraps some.
        family: the model's type.
    """
    refused = _REFUSED if family in _MAMBA else ""
    names = {name.rpartition(".")[2] for name in linear} - {refused}
    listed = ", ".join(sorted(name for name in names if not name.isdigit()))
    if refused:  # so that PEFT does not take all-linear either
        return f"name linear layers that PEFT adapts ({listed})"
    return f"name its query and value projections, or other linear layers ({listed}), or write all-linear"


#: The name of a head's block in messages.
HEAD = "head"


@dataclass(frozen=True)
class HeadModules:
    """The linear layers of a head. A clipper treats all of their weights and biases as it does one LoRA pair.

    Attributes:
        name: what messages call it.
        layers: the layers, in model order; each sees one row of states for a record, or one for each of its tokens.
    """

    name: str
    layers: tuple[torch.nn.Linear, ...]

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        """Weight (out, in) and, where it has one, bias (out,) of each layer in turn."""
        return tuple(parameter for layer in self.layers for parameter in layer.parameters())

    @property
    def size(self) -> int:
        """Number of trained parameters."""
        return sum(parameter.numel() for parameter in self.parameters)


def head_of(model: torch.nn.Module) -> HeadModules | None:
    """The head that PEFT trains and saves beside the adapter called default; None where there is none.

    Layers of a head that are not linear are not part of it: ``parameter_groups.trained_blocks`` then refuses the model.
    """
    wrappers = [module for module in model.modules() if isinstance(module, ModulesToSaveWrapper)]
    layers = [
        layer
        for wrapper in wrappers
        if "default" in wrapper.modules_to_save
        for layer in wrapper.modules_to_save["default"].modules()
        if isinstance(layer, torch.nn.Linear)
    ]
    return HeadModules(HEAD, tuple(layers)) if layers else None


def start_head(model: Any, names: tuple[str, ...], seed: int) -> None:
    """Fill a head before training: normal weights of the model's own deviation, biases of zero; by a public seed.

    Args:
        model: a sequence classifier of transformers, without adapters.
        names: names of the modules that are the head.

    Raises: ConfigError for a head with a layer that is not linear, whose per-sample gradients are not supported.
    """
    generator, deviation = torch.Generator().manual_seed(seed), getattr(model.config, "initializer_range", 0.02)
    for name in names:
        module = model.get_submodule(name)
        linear = [layer for layer in module.modules() if isinstance(layer, torch.nn.Linear)]
        if sum(p.numel() for p in module.parameters()) != sum(p.numel() for one in linear for p in one.parameters()):
            problem = f"{type(model).__name__} has a head ({name}) with layers that are not linear"
            raise ConfigError("model.source", problem, fix="give a BERT, RoBERTa, DistilBERT, ModernBERT or GPT")
        for layer in linear:
            with torch.no_grad():
                shape = layer.weight.shape
                layer.weight.copy_(deviation * torch.randn(shape, generator=generator))
                if layer.bias is not None:
                    layer.bias.zero_()


def keep_in_float32(head: HeadModules) -> None:
    """Hold a head in float32, whatever dtype the frozen model has: AdamW's steps are lost in fewer digits."""
    for layer in head.layers:
        layer.float()
        layer.register_forward_pre_hook(_in_its_dtype)


def _in_its_dtype(layer: torch.nn.Linear, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (inputs[0].to(layer.weight.dtype), *inputs[1:])
