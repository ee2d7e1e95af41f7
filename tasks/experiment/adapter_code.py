"""Scores texts with trained weights. MLflow keeps this file beside an adapter's weights, and runs it on load.

It needs MLflow, PEFT, PyTorch and transformers, and dptune only for a base in a package or a GGUF file.
Weights are safetensors: nothing is unpickled.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers
from mlflow.models import set_model
from mlflow.pyfunc.model import PythonModel
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoTokenizer, BitsAndBytesConfig

_OVERRIDE = "mlflow.pyfunc.load_model(uri, model_config={'base': 'FOLDER OR HUB NAME'})"


class ScoringAdapter(PythonModel):
    """The base model with the adapter. ``predict`` gives the log-likelihood of each text."""

    def load_context(self, context: Any) -> None:
        """Load base and adapter; the model's configuration names the base.

        Raises: ValueError if the base is not there, or is not the one that the adapter was trained on.
        """
        config = context.model_config
        base, revision = config["base"], config["revision"]
        path = Path(base)
        if base.startswith("package:") or base.endswith(".gguf"):
            from dptune import model_folder  # which finds such a base, and nothing else here needs
            from dptune.training.models.model_names import path_of

            path, base = path_of(base) or path, model_folder(base, config["dtype"])
        if config["base_sha256"]:
            _check_base(path, config["base_sha256"])
        self.width = int(config["max_length"])
        self.tokenizer = AutoTokenizer.from_pretrained(base, revision=revision, trust_remote_code=False)
        compute = getattr(torch, config["dtype"])
        as_trained = {}
        if config["load_in_4bit"]:  # needs bitsandbytes
            chosen = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)
            as_trained["quantization_config"] = chosen
        model = getattr(transformers, config["loaded_by"]).from_pretrained(
            base,
            revision=revision,
            dtype=compute,
            use_safetensors=True,
            trust_remote_code=False,
            **as_trained,
        )
        self.model = _with_trained(model, Path(context.artifacts["adapter"])).eval()

    def predict(self, context: Any, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """The log-likelihood (nats) of each text of the only column, and the number of tokens that it is of.

        A text is followed by the end-of-text token, cut at the training's length, and its first token is given. So
        exp of minus the sums' ratio is the perplexity that the run reports.
        """
        rows = [self._score(text) for text in model_input.iloc[:, 0]]
        return pd.DataFrame(rows, columns=["log_likelihood", "tokens"])

    @torch.no_grad()
    def _score(self, text: str) -> tuple[float, int]:
        ids, end = self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id
        ended = ids if end is None or ids[-1:] == [end] else [*ids, end]
        tokens = torch.tensor([ended[: self.width - 1]])
        logits = self.model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
        scores = torch.log_softmax(logits[:, :-1].double(), dim=-1)
        return float(scores.gather(-1, tokens[:, 1:, None]).sum()), tokens.shape[1] - 1


def _with_trained(model: Any, folder: Path) -> Any:
    """The base model with what trained: adapters, a whole checkpoint in its place, or some of its weights."""
    if (folder / "adapter_config.json").is_file():
        return PeftModel.from_pretrained(model, str(folder))
    if (changed := folder / "changed_weights.safetensors").is_file():
        model.load_state_dict(load_file(changed), strict=False)
        return model
    return type(model).from_pretrained(str(folder), dtype=model.dtype, use_safetensors=True, trust_remote_code=False)


def _check_base(folder: Path, expected: str) -> None:
    """Check that a local base model is the one that the adapter was trained on: on another, it predicts nonsense."""
    if not folder.exists():
        raise ValueError(f"the base model {folder} is not a folder here. Fix: {_OVERRIDE}.")
    if folder.is_file():  # GGUF
        found = _digest(folder)
    else:
        files = sorted(path for path in folder.iterdir() if path.is_file())
        found = hashlib.sha256("".join(f"{path.name} {_digest(path)}\n" for path in files).encode()).hexdigest()
    if found != expected:
        raise ValueError(f"the base model {folder} is not the one that the adapter was trained on. Fix: {_OVERRIDE}.")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


set_model(ScoringAdapter())
