"""Own weights of a model that train, in place of adapters beside it: all of them, biases, a head, or some layers.

They are held in float32, and noise is added to each. Whatever does not train stays as the checkpoint has it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.modeling_layers import GradientCheckpointingLayer

from dptune.core.errors import ConfigError
from dptune.core.files import naming, write_json
from dptune.core.settings import Lora, TrainedWeights
from dptune.training.gradients.parameter_groups import Block, layer_groups, trained_blocks
from dptune.training.losses import is_classifier
from dptune.training.models.model import attach_lora, save_adapter
from dptune.training.models.model_names import CHANGED, CHANGED_WEIGHTS, name_of
from dptune.training.models.quantization import method_of
from dptune.training.models.trained_layers import start_head

_FIELD, _LAYERS = "train", "train_layers"
#: Attribute of a model without adapters that says what of it trains.
_OWN = "own_weights"
#: Kinds that are delivered as a whole checkpoint; of the others only the changed weights are.
_WHOLE = ("all", "layers")
_SOME = 4


@dataclass(frozen=True)
class OwnWeights:
    """What trains of a model without adapters. Public.

    Attributes:
        trained: the settings.
        head: names of the modules of a classifier's new head, which trains with each of them.
        names: names of the parameters that train, in model order, without further names of tied ones.
    """

    trained: TrainedWeights
    head: tuple[str, ...]
    names: tuple[str, ...]

    @property
    def whole(self) -> bool:
        """Whether a whole checkpoint is delivered, and not the changed weights alone."""
        return self.trained.train in _WHOLE


def own_weights(model: Any) -> OwnWeights | None:
    """What trains of a model that ``train_own`` returned; None of one with adapters."""
    found = getattr(model, _OWN, None)
    return found if isinstance(found, OwnWeights) else None


def what_trains(model: Any) -> str:
    """What trains, as a run's header names it (``TrainedWeights.said``)."""
    own = own_weights(model)
    return "lora" if own is None else own.trained.said


def groups_of(model: Any) -> list[Block]:
    """The parameter groups that a run trains: LoRA pairs and a head, or layers whose own weights train.

    Raises: ConfigError as ``trained_blocks`` and ``layer_groups``.
    """
    return trained_blocks(model) if own_weights(model) is None else list(layer_groups(model))


def start_training(model: Any, trained: TrainedWeights, lora: Lora, init_seed: int, head: tuple[str, ...] = ()) -> Any:
    """The model as a run starts to train it: with new adapters, or with its own weights made trainable.

    Args:
        head: modules of a classifier's new head, which trains in full.

    Raises: ConfigError as ``attach_lora`` and ``train_own``.
    """
    if trained.train == "lora":
        return attach_lora(model, lora, init_seed, head)
    return train_own(model, trained, init_seed, head)


def train_own(model: Any, trained: TrainedWeights, init_seed: int, head: tuple[str, ...] = ()) -> Any:
    """Make those of a frozen model's own weights trainable that the settings name. Returns the model.

    Each of them becomes a new tensor in float32: copies of the model that share its frozen weights do not move. A tied
    weight stays one tensor.

    Raises: ConfigError for weights in 4 bits or bfloat16, for names that no weight has, for biases of a model without
        any, and for one side of a tied weight.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> config = GPT2Config(vocab_size=9, n_positions=8, n_embd=8, n_layer=1, n_head=1)
        >>> model = GPT2LMHeadModel(config).requires_grad_(False)
        >>> biases = train_own(model, TrainedWeights(train="bias"), init_seed=0)
        >>> own_weights(biases).names[:2]
        ('transformer.h.0.ln_1.bias', 'transformer.h.0.attn.c_attn.bias')
    """
    if (method := method_of(model.config)) is not None:
        problem = f"{trained.train} moves the weights themselves, and this model's are quantised ({method})"
        raise ConfigError(_FIELD, problem, fix="set it to lora, or give the checkpoint before quantisation")
    names = _chosen(model, trained, head)
    if head:
        start_head(model, head, init_seed)
    places = _places(model)
    parameters = dict(model.named_parameters())
    if other := next((name for name in names if parameters[name].dtype != torch.float32), None):
        problem = f"weight {other} is {parameters[other].dtype}, whose digits lose the steps of training"
        raise ConfigError("model.dtype", problem.replace("torch.", ""), fix="use float32, with autocast bfloat16")
    chosen = [id(parameters[name]) for name in names]
    del parameters
    for identity in chosen:
        (module, key), *_ = places[identity]
        new = torch.nn.Parameter(module._parameters[key].detach().clone(), requires_grad=True)
        for module, key in places[identity]:
            module._parameters[key] = new
    setattr(model, _OWN, OwnWeights(trained, head, tuple(names)))
    return model.eval()


def _places(model: torch.nn.Module) -> dict[int, list[tuple[Any, str]]]:
    """Module and attribute of each place that a parameter stands in, by the parameter's id."""
    found: dict[int, list[tuple[Any, str]]] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((module, key))
    return found


def _chosen(model: Any, trained: TrainedWeights, head: tuple[str, ...]) -> list[str]:
    """Names of the parameters that train, in model order."""
    names = [name for name, _ in model.named_parameters()]
    kind = type(model).__name__
    if trained.train == "all":
        return names
    if trained.train == "bias":
        found = {name for name in names if name.rpartition(".")[2] == "bias" and not _within(name, head)}
        if not found:
            problem = f"{kind} has no biases, which bias would train"
            raise ConfigError(_FIELD, problem, fix="use lora, all, head or layers")
    elif trained.train == "head":
        found = set() if head else set(_output(model, kind))
    else:
        found = _named(model, trained)
    return [name for name in names if name in found or _within(name, head)]


def _within(name: str, modules: Collection[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def _output(model: Any, kind: str) -> Iterator[str]:
    """Names of the parameters of a text model's output layer, which no other layer may share."""
    output = None if is_classifier(model) else model.get_output_embeddings()
    fix = "use lora, all, bias or layers"
    if output is None:
        raise ConfigError(_FIELD, f"{kind} has no output layer that head could train", fix=fix)
    own = {id(parameter) for parameter in output.parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in own and model.get_submodule(name.rpartition(".")[0]) is not output:
            problem = f"the output layer of {kind} is tied to {name}, and head would train one side of it alone"
            raise ConfigError(_FIELD, problem, fix=fix)
    return (name for name, parameter in model.named_parameters() if id(parameter) in own)


def _named(model: Any, trained: TrainedWeights) -> set[str]:
    """The parameters that ``train_layers`` names, by their first names."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = [(name, id(parameter)) for name, parameter in model.named_parameters(remove_duplicate=False)]
    if (last := trained.last_layers) is not None:
        prefixes = _last_layers(model, last)
        named = [name for name, _ in every if _within(name, prefixes)]
    else:
        pattern = re.compile(rf"(.*\.)?({trained.train_layers})")
        named = [name for name, _ in every if any(pattern.fullmatch(part) for part in _prefixes(name))]
    if not named:
        some = ", ".join(list(first.values())[:: max(1, len(first) // _SOME)][:_SOME])
        problem = f"{trained.train_layers!r} names no module or weight of {type(model).__name__}"
        raise ConfigError(_LAYERS, problem, fix=f"match the end of a name, such as {some}, or of a module in them")
    for name, identity in every:
        if name not in named and any(other in named for other, same in every if same == identity):
            other = next(one for one, same in every if same == identity and one in named)
            problem = f"{trained.train_layers!r} names {other}, which is tied to {name}: one tensor in two places"
            raise ConfigError(_LAYERS, problem, fix=f"name both (|{re.escape(name)}), or neither of them")
    return {first[identity] for name, identity in every if name in named}


def _prefixes(name: str) -> Iterator[str]:
    """A parameter's name, and those of the modules that it lies in."""
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _last_layers(model: Any, count: int) -> list[str]:
    """Names of the last transformer layers. Raises: ConfigError for a model without a single list of them."""
    lists = [
        (name, len(module))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
        and any(isinstance(one, GradientCheckpointingLayer) for one in module)
    ]
    if len(lists) != 1:
        problem = f"{type(model).__name__} has {len(lists)} lists of transformer layers, so the last are not known"
        raise ConfigError(_LAYERS, problem, fix="give a regular expression of names")
    name, length = lists[0]
    if count > length:
        problem = f"asks for {count} layers, and {type(model).__name__} has {length}"
        raise ConfigError(_LAYERS, problem, fix=f"use 'last {length}' or fewer")
    return [f"{name}.{number}" for number in range(length - count, length)]


# The files of trained weights.


def save_trained(model: Any, directory: Path) -> None:
    """Write what trained: an adapter, a whole checkpoint, or the changed weights with a list of their names.

    transformers alone loads the last two: by ``from_pretrained``, or by ``load_state_dict`` with ``strict=False``. No
    file names a path of this machine.
    """
    own = own_weights(model)
    if own is None:
        save_adapter(model, directory)
    elif own.whole:
        model.config._name_or_path = name_of(str(getattr(model.config, "_name_or_path", "") or ""))
        with naming(directory):
            model.save_pretrained(str(directory), max_shard_size="1000TB")
    else:
        state = dict(model.named_parameters())
        with naming(directory):
            directory.mkdir(parents=True, exist_ok=True)
            tensors = {name: state[name].detach().cpu().contiguous() for name in own.names}
            save_file(tensors, directory / CHANGED_WEIGHTS, metadata={"format": "pt"})
        kind = {"architectures": [type(model).__name__]}
        write_json(directory / CHANGED, {"train": own.trained.said, "weights": list(own.names), **kind})
