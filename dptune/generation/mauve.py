"""MAUVE (Pillutla et al. 2021): how near the outputs' distribution is to the references', by the package mauve-text.

Its value depends on the model whose hidden states it compares, so that model is named, and no default is fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from dptune.errors import ConfigError
from dptune.progress import Meter
from dptune.training.causal import evaluation_mode, most_positions
from dptune.training.model import ModelSource, load_base, load_config, load_tokenizer

#: Tokens of a text that are read, as the package has them.
_MOST_TOKENS = 1024
#: Outputs of which the package makes ten buckets.
_FEWEST = 100


@dataclass(frozen=True)
class Judge:
    """The public causal model whose last hidden state at a text's last token stands for the text.

    Attributes:
        source: the checkpoint; the authors take GPT-2 large.
        device: where it runs.
    """

    source: ModelSource
    device: torch.device

    @property
    def name(self) -> str:
        """The checkpoint's name, with its commit if it has one; of a folder the last part of its path."""
        if self.source.revision is None:
            return Path(self.source.source).resolve().name
        return f"{self.source.source}@{self.source.revision}"


def check(judge: Judge | None) -> None:
    """Raises: ConfigError if the package or the model is not there."""
    _package()
    if judge is None:
        problem = "mauve needs a model that reads the texts"
        raise ConfigError("mauve_model", problem, fix="name one; the authors of MAUVE take GPT-2 large")
    load_config(judge.source)


def _package() -> Any:
    try:
        import mauve
    except ImportError:
        raise ConfigError("metrics", "mauve needs mauve-text", fix="pip install 'dptune[mauve]'") from None
    return mauve


def mauve(outputs: Sequence[str], references: Sequence[Sequence[str]], judge: Judge) -> tuple[float, str]:
    """MAUVE of outputs beside each item's first reference, without their prompts, and its signature.

    Args:
        judge: the model that reads both.

    Raises: ConfigError if the package is not there, the model cannot be had, or outputs are too few to compare.
    """
    if len(outputs) < _FEWEST:
        problem = f"mauve compares distributions, and there are {len(outputs)} outputs"
        raise ConfigError("metrics", problem, fix=f"give {_FEWEST} at least; its authors advise thousands")
    package = _package()
    model, tokenizer = load_base(judge.source, judge.device), load_tokenizer(judge.source)
    with evaluation_mode(model):
        written, read = (_states(model, tokenizer, texts, judge) for texts in (outputs, [own[0] for own in references]))
    found = package.compute_mauve(p_features=read, q_features=written)
    signed = f"mauve-text {version('mauve-text')}|features:{judge.name}, last token|texts:{len(outputs)} of each"
    return float(found.mauve), f"{signed}|buckets:{found.num_buckets}|scale:5|seed:25"


def _states(model: Any, tokenizer: Any, texts: Sequence[str], judge: Judge) -> Any:
    """Hidden states of the last layer at each text's last token, of shape (texts, width)."""
    most = min(_MOST_TOKENS, most_positions(model) or _MOST_TOKENS)
    states = []
    with torch.no_grad(), Meter("MAUVE reads texts", total=len(texts), unit="texts") as meter:
        for text in texts:
            # A text without tokens is read as the end-of-text token alone.
            ids = tokenizer.encode(text)[:most] or [tokenizer.eos_token_id]
            read = model(input_ids=torch.tensor([ids], device=judge.device), output_hidden_states=True)
            states.append(read.hidden_states[-1][0, -1].float().cpu())
            meter.update(len(states))
    return torch.stack(states).numpy()
