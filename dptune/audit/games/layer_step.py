"""Model of the attacker of a step that trains a model's own weights: its gradients are those that runs clip.

Norms and sums come from the engine of ``train: all``, of texts that the attacker wrote. The model is small, and its
output layer is tied to its embeddings. The attacked text repeats two tokens, whose two uses pull the same way: without
the cross term of the tied weight, its norm would be 0.84 of what it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from dptune.audit.games.scene import StepScene
from dptune.core.errors import ConfigError
from dptune.mechanisms.gradient_interfaces import Gradients
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.registry import build, of_model
from dptune.training.gradients.layer_gradients import LayerGradients, layer_gradients
from dptune.training.gradients.parameter_groups import LayerModules, layer_groups

#: Sizes at which the engine takes Gram matrices for the tied weight, whose cross term then is a term of its own.
_VOCABULARY, _WIDTH, _INNER, _POSITIONS = 64, 16, 8, 8
_ATTACKED, _OTHERS = (1, 2, 1), ((3, 4, 5), (6, 7, 8), (9, 10, 11), (12, 13, 14))
#: Scenes in which the text is in or out; multiples do not count here.
_SCENES = (
    StepScene("alone", (), 1.0),
    StepScene("among others", (1.0,) * len(_OTHERS), 1.0),
    StepScene("in a micro-batch of its own", (1.0,) * len(_OTHERS), 1.0, apart=True),
)


@dataclass(frozen=True)
class LayerModel:
    """The attacker's model, all of whose weights train.

    Example:
        >>> LayerModel().groups[0].name
        'transformer.wte+lm_head'
    """

    scenes: tuple[StepScene, ...] = field(default=_SCENES, init=False)

    @cached_property
    def model(self) -> Any:
        """The model, with zeros wherever a weight would only add to the length of the attacked text's gradient."""
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"vocab_size": _VOCABULARY, "n_embd": _WIDTH, "n_inner": _INNER, "n_positions": _POSITIONS}
        still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, **sizes, **still)).requires_grad_(True).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "wpe" in name or ("c_" in name and name.endswith("weight")):
                    weight.zero_()
        return model

    @cached_property
    def groups(self) -> list[LayerModules]:
        """Its layers, which are clipped and noised together."""
        return list(layer_groups(self.model))

    def mechanism(self, name: str, entry: Mapping[str, Any]) -> Mechanism:
        """The mechanism of an entry, for this model's weights.

        Raises: ConfigError for one that cannot train own weights, or whose noise is correlated.
        """
        built = build(name, of_model(name, entry, len(self.groups), sum(group.size for group in self.groups)))
        built.check_trained(head=False, own=True)
        if built.bands > 1:
            problem = f"{name} has {built.bands}, and steps of own weights are attacked one at a time"
            raise ConfigError("bands", problem, fix="take a mechanism of independent noise, or attack adapters")
        return built

    def batches(self, scene: StepScene, with_sample: bool) -> list[Gradients]:
        """Micro-batches of a scene's texts."""
        others, sample = _OTHERS[: len(scene.others)], (_ATTACKED,) if with_sample else ()
        parts = [others, sample] if scene.apart else [(*others, *sample)]
        return [self._of(part) for part in parts if part]

    def _of(self, texts: Sequence[tuple[int, ...]]) -> Gradients:
        ids = torch.tensor(texts)
        return _Repeated(layer_gradients(self.model, self.groups, ids, torch.ones_like(ids), None, len(texts)))


@dataclass
class _Repeated:
    """Gradients that thousands of trials ask for the same sum."""

    own: LayerGradients
    sums: dict[bytes, list[torch.Tensor]] = field(default_factory=dict)

    @property
    def margin(self) -> float:
        return self.own.margin

    def norms(self) -> torch.Tensor:
        return self.own.norms()

    def losses(self) -> torch.Tensor:
        return self.own.losses()

    def tokens(self) -> torch.Tensor:
        return self.own.tokens()

    def matrix(self) -> torch.Tensor:
        return self.own.matrix()

    def weighted_sum(self, factors: torch.Tensor) -> list[torch.Tensor]:
        """In float64, as a run's steps go on with it."""
        key = factors.contiguous().numpy().tobytes()
        if key not in self.sums:
            self.sums = {key: [part.double() for part in self.own.weighted_sum(factors, keep=True)]}
        return [part.clone() for part in self.sums[key]]
