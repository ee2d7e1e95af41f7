"""Private answers with a vocabulary of 50,257: ``python -m benchmarks.prediction [--rounds N] [--device cuda]``.

One token after a context, GPT-2 small's shape with random weights, LoRA of rank 4. The named peer is the plain loop in
the same run: one adapter after the other copied into a PEFT model, one forward pass each, and for each model SciPy's
``brentq`` for its weight. Ours is what serves (one pass of two rows, the weight of one slot), and the whole law of all
models, in batches.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from scipy.optimize import brentq
from transformers import GPT2Config, GPT2LMHeadModel

from dptune.core.settings import Lora
from dptune.prediction.mixture import law
from dptune.prediction.predictor import PrivatePredictor, next_log_probabilities, weights_of
from dptune.prediction.protocols import FixedMixture
from dptune.privacy.entropy import OsEntropy
from dptune.training.gradients.stacked_adapters import PUBLIC, StackedAdapters
from dptune.training.models.model import attach_lora

LORA = Lora(rank=4, alpha=32, dropout=0.0)
CONTEXT = 32
_BATCH = 8  # rows of a pass over all models


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", type=int, nargs="+", default=[8, 80])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    base = GPT2LMHeadModel(GPT2Config(n_layer=arguments.layers)).eval().requires_grad_(False).to(device)
    peft = attach_lora(base, LORA, 0).eval()
    shapes = get_peft_model_state_dict(peft)
    context = torch.randint(0, 50_257, (CONTEXT,)).tolist()
    print(f"{device}, {torch.get_num_threads()} threads, {arguments.rounds} rounds, context of {CONTEXT} tokens")
    for models in arguments.models:
        adapters = [{key: 0.03 * torch.randn_like(value) for key, value in shapes.items()} for _ in range(models)]
        _compare(peft, adapters, context, models, arguments.rounds, device)


def _compare(
    peft: torch.nn.Module, adapters: list, context: list[int], models: int, rounds: int, device: torch.device
) -> None:
    plain = GPT2LMHeadModel(peft.base_model.model.config).eval().requires_grad_(False).to(device)
    state = {key.replace("base_layer.", ""): value for key, value in peft.base_model.model.state_dict().items()}
    plain.load_state_dict({key: value for key, value in state.items() if "lora_" not in key})
    stacked = StackedAdapters.of(adapters, LORA.alpha / LORA.rank, device)
    protocol = FixedMixture(models=models)
    predictor = PrivatePredictor(plain, stacked, protocol, None, OsEntropy())
    ours: dict[str, Callable[[], object]] = {
        "one plain forward pass": lambda: _forward(plain, context),
        "an answer (two rows, one slot)": lambda: predictor._draw(context),
        "the whole law of all models": lambda: _whole(plain, stacked, context, protocol),
    }
    expected = _reference(peft, plain, adapters, context, protocol)
    assert np.allclose(_whole(plain, stacked, context, protocol), expected, atol=1e-6), "the laws differ"
    for work in ours.values():
        work()
    seconds = {name: [_seconds(work, device) for _ in range(rounds)] for name, work in ours.items()}
    peer = _seconds(lambda: _reference(peft, plain, adapters, context, protocol), device)
    print(f"N = {models}: the plain loop takes {peer:.2f} s a token, {1 / peer:.3f} tokens a second")
    forward = min(seconds["one plain forward pass"])
    for name, taken in seconds.items():
        middle = sorted(taken)[len(taken) // 2]
        print(
            f"  {name}: {middle:.3f} s ({min(taken):.3f} to {max(taken):.3f}), {1 / middle:.2f} tokens a second, "
            f"{peer / middle:.1f} times the peer's, {middle / forward:.2f} plain passes"
        )


@torch.no_grad()
def _forward(model: torch.nn.Module, context: list[int]) -> torch.Tensor:
    ids = torch.tensor([context], device=next(model.parameters()).device)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
    return torch.log_softmax(logits[0, -1].double(), -1)


def _whole(model: torch.nn.Module, stacked: StackedAdapters, context: list[int], protocol: FixedMixture) -> np.ndarray:
    rows = [PUBLIC, *range(len(stacked))]
    parts = [rows[start : start + _BATCH] for start in range(0, len(rows), _BATCH)]
    laws = torch.cat([next_log_probabilities(model, stacked, context, part) for part in parts])
    public, private = laws[:1], laws[1:, None]
    return law(public, private, weights_of(protocol, public, private), protocol.slots)[0].cpu().numpy()


def _reference(
    peft: torch.nn.Module, plain: torch.nn.Module, adapters: list, context: list[int], protocol: FixedMixture
) -> np.ndarray:
    """One adapter at a time, one weight at a time."""
    public = _forward(plain, context).exp().cpu().numpy()
    total, share = np.zeros_like(public), protocol.slots.share
    for adapter in adapters:
        set_peft_model_state_dict(peft, adapter)
        private = _forward(peft, context).exp().cpu().numpy()

        def over(weight: float, private: np.ndarray = private) -> float:
            moved = public + share * weight * (private - public)
            forward = (public * (moved / public) ** protocol.alpha).sum()
            backward = (public * (moved / public) ** (1 - protocol.alpha)).sum()
            return float(max(forward, backward) - 1 - protocol.excess)

        weight = brentq(over, 0, 1, xtol=1e-6) if over(1.0) > 0 else 1.0
        total += (1 - protocol.public_weight) / protocol.models * (public + weight * (private - public))
    return protocol.public_weight * public + total


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
