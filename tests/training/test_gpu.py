"""What a CUDA device must keep of what the CPU keeps: gradients, bits, noise, every mechanism's step, private answers.

Each test runs on the CPU too, so that it is known to be right where there is no GPU. On one, also run the other tests
of training there: ``DPTUNE_TEST_DEVICE=cuda pytest tests/training`` (docs/howto/gpu.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from tiny_models import CPU, each_record, make_plan, records, row_gradient, weights
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModelForCausalLM

from dptune.core.settings import Lora
from dptune.mechanisms.noises.gaussian import Gaussian, signed_tail_on, standard_normal
from dptune.mechanisms.registry import MECHANISMS, build, lacks_noise
from dptune.prediction.mixture import law
from dptune.prediction.predictor import weights_of
from dptune.prediction.protocols import FixedMixture
from dptune.privacy.entropy import FixedSeed, OsEntropy, signed_tail
from dptune.training.data import Tokens
from dptune.training.gradients.parameter_groups import lora_pairs
from dptune.training.gradients.per_sample import per_sample_gradients
from dptune.training.loop import train
from dptune.training.models.model import attach_lora
from dptune.training.privacy_units import PrivacyUnits
from dptune.training.spec import RunSpec, header_of

VOCABULARY = 97
_SIZES = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": 256, "n_embd": 64, "n_layer": 2, "n_head": 4},
    "llama": _LLAMA,
    "mistral": _LLAMA | {"sliding_window": 16},
    "qwen2": _LLAMA,
    "qwen3": _LLAMA | {"head_dim": 16},
}
DTYPES = [None, torch.bfloat16]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return torch.device(request.param)


def adapted(family: str, device: torch.device, attention: str = "sdpa", **sizes: Any) -> Any:
    """A model of random weights whose adapters have moved away from zero."""
    torch.manual_seed(0)
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) if family == "gpt2" else {}
    config = AutoConfig.for_model(family, **(_SIZES | FAMILIES[family] | dropout | sizes))
    base = AutoModelForCausalLM.from_config(config, attn_implementation=attention).requires_grad_(False)
    model = attach_lora(base.to(device), Lora(rank=4, alpha=8, dropout=0.0), init_seed=7)
    for parameter in (one for one in model.parameters() if one.requires_grad):
        parameter.data.copy_(0.1 * torch.randn(parameter.shape))
    return model.train()


def gradients_of(
    model: Any, tokens: Tokens, chosen: Sequence[int], height: int, autocast: torch.dtype | None
) -> torch.Tensor:
    """(units, parameters) in float64, on the CPU."""
    ids, mask = tokens.batch(np.array(chosen), next(model.parameters()).device, height=height)
    found = per_sample_gradients(model, lora_pairs(model), ids, mask, None, len(chosen), autocast=autocast)
    return found.matrix().cpu()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("autocast", DTYPES, ids=str)
def test_per_sample_gradients_equal_a_loop(device: torch.device, family: str, autocast: torch.dtype | None) -> None:
    """In float32 to 1e-5 of a record's largest entry; bfloat16 is compared with the loop in float32."""
    model, tokens = adapted(family, device), records(6)
    found = gradients_of(model, tokens, range(6), 6, autocast)
    expected = torch.stack([row_gradient(model, row) for row in tokens.rows]).double().cpu()
    if autocast is None:
        assert float(((found - expected).abs().amax(1) / expected.abs().amax(1)).max()) < 1e-5
    else:
        assert float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max()) < 0.1


KERNELS = {
    "eager": ("eager", None),
    "chosen by torch": ("sdpa", None),
    "math": ("sdpa", SDPBackend.MATH),
    "efficient": ("sdpa", SDPBackend.EFFICIENT_ATTENTION),
}
SHAPES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "small": (4, 14, {}),
    "wide": (16, 128, {"n_embd": 512, "hidden_size": 512, "intermediate_size": 1024}),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("autocast", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "qwen2"])
def test_neighbours_do_not_change_one_bit(
    device: torch.device, family: str, autocast: torch.dtype | None, kernel: str, shape: str
) -> None:
    """Others in the batch, none at all, all of them as long as can be, and the record's own place in it."""
    if device.type == "cpu" and (shape == "wide" or KERNELS[kernel][1]):
        pytest.skip("the CPU's kernels are tested in test_per_sample.py")
    rows, width, sizes = SHAPES[shape]
    attention, backend = KERNELS[kernel]
    known = AutoConfig.for_model(family)
    own = {name: size for name, size in sizes.items() if name in known.to_dict()}  # GPT-2 has n_embd alone
    model = adapted(family, device, attention, **own)
    generator = np.random.default_rng(0)
    lengths = [width // 2, *generator.integers(3, width, rows - 1), *[width - 1] * (rows - 1)]
    some = [generator.integers(1, VOCABULARY, size=length).astype(np.int32) for length in lengths]
    tokens, others, full = Tokens(some, 0, width), range(1, rows), range(rows, 2 * rows - 1)
    with sdpa_kernel(backend) if backend else nullcontext():
        batches = [[0], [0, *others], [0, *full], [*others, 0], [*full, 0], [1, 0, 2]]
        found = [gradients_of(model, tokens, batch, rows, autocast)[batch.index(0)] for batch in batches]
    assert all(torch.equal(one, found[0]) for one in found[1:3]), "by who else is there"
    assert all(torch.equal(one, found[0]) for one in found[3:]), "by the record's place"


def test_the_noise_is_normal_in_float64_and_lies_on_the_public_grid(device: torch.device) -> None:
    """Kolmogorov-Smirnov of 400,000 and of what lies beyond three deviations; false alarm 2e-9."""
    noise = standard_normal(OsEntropy(), 400_000, device)
    assert noise.dtype == torch.float64
    assert noise.device.type == device.type
    values = noise.cpu().numpy()
    assert stats.kstest(values, "norm").pvalue > 1e-9
    beyond = np.abs(values[np.abs(values) > 3])
    assert stats.kstest(beyond, lambda x: 1 - stats.norm.sf(x) / stats.norm.sf(3)).pvalue > 1e-9
    (noisy,) = Gaussian(1.0).add([torch.zeros(100_000, device=device)], [1.0], 1.0, OsEntropy())
    on_grid = noisy.double() * 2**20  # float32 holds all its multiples up to 16
    assert torch.equal(on_grid, on_grid.round())


def test_the_same_words_give_the_same_tails_as_on_the_cpu(device: torch.device) -> None:
    """Bit for bit, those too that a second word continues: the least words, and some of 300,000."""

    class Least(FixedSeed):
        def words(self, count: int) -> NDArray[np.uint64]:
            return np.array([0, 1, 2**48 - 1, 2**48, 2**63, 2**64 - 1], dtype=np.uint64)[np.arange(count) % 6]

    for entropy, count in ((FixedSeed, 300_000), (Least, 6)):
        found, expected = signed_tail_on(device, entropy(1), count), signed_tail(entropy(1), count)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours.cpu(), torch.from_numpy(theirs))
    # The quantile is another implementation: some units in the last place.
    for entropy, count in ((FixedSeed, 30_000), (Least, 6)):
        normal = standard_normal(entropy(1), count, device)
        torch.testing.assert_close(normal.cpu(), standard_normal(entropy(1), count, CPU), rtol=1e-12, atol=1e-15)


@pytest.mark.gpu
def test_copies_that_wait_for_a_busy_device_are_their_own() -> None:
    """Eight draws are queued behind a kernel of about a second: memory that is used again too early would be seen."""
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    device, one, other = torch.device("cuda"), FixedSeed(2), FixedSeed(2)
    signed_tail_on(device, OsEntropy(), 300_000)  # the allocator has a block to give again
    torch.cuda._sleep(2 * 10**9)
    found = [signed_tail_on(device, one, 300_000) for _ in range(8)]
    for pair in found:
        for ours, theirs in zip(pair, signed_tail(other, 300_000), strict=True):
            assert torch.equal(ours.cpu(), torch.from_numpy(theirs))


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_trains_and_ends_near_the_cpus_run(device: torch.device, name: str, tmp_path: Path) -> None:
    """Three steps with the same coins and noise, all records in each batch.

    Kernels round in other ways, and AdamW divides by what is next to nothing, so that single weights may be apart.
    Which basis geoclip finds for equal eigenvalues is the library's choice, and the same noise in it is other noise.
    """
    local = name == "dp_lora_fed"
    found = []
    for place in (CPU, device):
        model, tokens, entropy = adapted("gpt2", place), records(8), FixedSeed(3)
        units = PrivacyUnits.clients(4, np.arange(8)) if local else each_record(tokens)
        noise = {"noise_multiplier": 0.7} if lacks_noise(name, {}) else {}
        few = {"interval": 2, "warmup": 1, "batch_size": 2} if name.startswith("rldp") else {}
        options = noise | few | ({"bands": 2} if name == "banded" else {}) | {"pairs": len(lora_pairs(model))}
        mechanism = build(name, options)
        rate = 0.5 if name == "banded" else 1.0
        plan = make_plan(of=len(units), sample_rate=rate, steps=3, learning_rate=1e-3, physical_batch_size=3)
        header = header_of(mechanism, units, entropy, delta=1e-5)
        spec = RunSpec(model, tokens, units, mechanism, plan, header, public=records(4, seed=9))
        train(spec, tmp_path / place.type, entropy).close()
        found.append(weights(model))
        if place == device:
            break
    ours, first = found[-1], found[0]
    for key, value in first.items():
        assert torch.isfinite(ours[key]).all()
        if name != "geoclip":
            assert float((ours[key].cpu() - value).abs().mean()) < 2e-4, key  # a step is up to 1e-3 in each weight


def test_a_private_answers_law_is_the_cpus(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    private, public = (
        torch.log_softmax(3 * torch.randn(*shape, 500, generator=generator, dtype=torch.float64), -1)
        for shape in ((5, 1), (1,))
    )
    protocol, laws = FixedMixture(models=5), []
    for place in (device, CPU):
        one, other = public.to(place), private.to(place)
        laws.append(law(one, other, weights_of(protocol, one, other), protocol.slots).cpu())
    torch.testing.assert_close(laws[0], laws[1], rtol=1e-9, atol=1e-12)
