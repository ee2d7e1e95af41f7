"""MAUVE (Pillutla et al. 2021): how near the outputs' distribution is to the references', by the package mauve-text.

Its value depends on the model whose hidden states it compares, so that model is named, and no default is fetched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from dptune.core.errors import ConfigError
from dptune.core.progress import Meter
from dptune.training.models.causal import evaluation_mode, most_positions
from dptune.training.models.model import ModelSource, load_base, load_config, load_tokenizer
from dptune.training.models.model_names import name_of

#: Tokens of a text that are read, as the package has them.
_MOST_TOKENS = 1024
#: Outputs of which the package makes ten buckets.
_FEWEST = 100
_FIELD = "mauve_model"


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
        """The last part of a path; else the name on the hub with its commit, or a package with its version."""
        name, revision = name_of(self.source.source), self.source.revision
        return f"{name}@{revision}" if name == self.source.source and revision else name


def check(judge: Judge | None) -> None:
    """Look whether MAUVE can be computed, before anything is written for it.

    Raises: ConfigError for a package or model that is not there, and a tokenizer that reads nothing.
    """
    _package()
    if judge is None:
        raise ConfigError(_FIELD, "mauve needs a model that reads the texts", fix="name one, such as GPT-2 large")
    folder = Path(judge.source.location)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        raise ConfigError(_FIELD, f"{judge.name} holds no *.safetensors", fix="name a checkpoint with its weights")
    with _named():
        load_config(judge.source)
        tokenizer = load_tokenizer(judge.source)
    # transformers makes an empty tokenizer of a checkpoint that has none.
    if len(tokenizer) < 2 or not tokenizer.encode("a text of some words"):
        raise ConfigError(_FIELD, f"{judge.name} has no tokenizer", fix="name a checkpoint with its tokenizer")


def check_number(outputs: int) -> None:
    """Raises: ConfigError for too few outputs to compare their distribution with another."""
    if outputs < _FEWEST:
        problem = f"mauve compares distributions, and there are {outputs} outputs"
        raise ConfigError("metrics", problem, fix=f"give {_FEWEST} at least; its authors advise thousands")


@contextmanager
def _named() -> Iterator[None]:
    """Let errors about the judge name it, and not the model that is scored."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(_FIELD, error.problem, fix=error.fix) from None


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

    Raises: ConfigError as ``check`` and ``check_number``.
    """
    check_number(len(outputs))
    with _named():
        model, tokenizer = load_base(judge.source, judge.device), load_tokenizer(judge.source)
    with evaluation_mode(model):
        written, read = (_states(model, tokenizer, texts, judge) for texts in (outputs, [own[0] for own in references]))
    found = _package().compute_mauve(p_features=read, q_features=written)
    signed = f"mauve-text {version('mauve-text')}|features:{judge.name}, last token|texts:{len(outputs)} of each"
    return float(found.mauve), f"{signed}|empty:end-of-text|buckets:{found.num_buckets}|scale:5|seed:25"


def _states(model: Any, tokenizer: Any, texts: Sequence[str], judge: Judge) -> Any:
    """Hidden states of the last layer at each text's last token, of shape (texts, width)."""
    most = min(_MOST_TOKENS, most_positions(model) or _MOST_TOKENS)
    states = []
    with torch.no_grad(), Meter("MAUVE reads texts", total=len(texts), unit="texts") as meter:
        for text in texts:
            ids = tokenizer.encode(text)[:most] or [_end(tokenizer)]
            read = model(input_ids=torch.tensor([ids], device=judge.device), output_hidden_states=True)
            states.append(read.hidden_states[-1][0, -1].float().cpu())
            meter.update(len(states))
    return torch.stack(states).numpy()


def _end(tokenizer: Any) -> int:
    """What an empty text is read as."""
    if tokenizer.eos_token_id is None:
        problem = "its tokenizer has no end-of-text token, which stands for an empty output"
        raise ConfigError(_FIELD, problem, fix="name another model")
    return int(tokenizer.eos_token_id)
