"""Policy gradient on a language model: what one user can move, and by how much."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from peft import PeftModel
from scipy.stats import norm
from tiny_models import VOCABULARY, gpt2

from dptune.core.errors import ConfigError
from dptune.core.settings import Lora
from dptune.policy.language.learner import (
    USERS,
    Factors,
    Figures,
    LanguageLearner,
    LanguagePolicy,
    bandit_loss,
    flat_adapters,
    write_adapters,
)
from dptune.policy.language.prompts import CLINICAL, Lexicon, Prompts, Stream
from dptune.policy.language.training import LanguageState, adapters_by_update, train
from dptune.policy.method import Dppg
from dptune.policy.schedules import Bandit
from dptune.privacy.entropy import OsEntropy
from dptune.privacy.ledger_file import read_ledger
from dptune.privacy.run_header import RunHeader
from dptune.training.models.model import attach_lora, save_adapter

LETTERS = Lexicon(frozenset("abcdefghijklm"), frozenset("nopqrstuvwxyz"))
TEXTS = ["Ann has K7", "Bo", "Cleo: Z9, and more", "Dora is at home"]
LORA = Lora(rank=4, alpha=8, dropout=0.0)
FOUR = [0, 1, 2, 3]


class Characters:
    """A tokenizer with one token for each printable character; token 0 is end of text and padding."""

    pad_token_id = eos_token_id = 0

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(one) - 31 for one in text] for text in texts]}

    def batch_decode(self, rows: list[list[int]], **_: Any) -> list[str]:
        return ["".join(chr(one + 31) for one in row if 0 < one < VOCABULARY - 1) for row in rows]


@cache
def policy() -> LanguagePolicy:
    base = gpt2()
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.mul_(3)  # a fresh model gives all tokens nearly the same probability
    return LanguagePolicy(base, Characters(), LORA, seed=7)


def learner(noise: float = 0.0, **changes: Any) -> LanguageLearner:
    small = {"users": 4, "updates": 2, "prompt_tokens": 10, "new_tokens": 6, "radius": 0.1, "evaluate_every": 1}
    return LanguageLearner(policy(), LETTERS, Dppg(noise_multiplier=noise, critic="none"), Bandit(**(small | changes)))


def prompts(texts: list[str], width: int = 10) -> Prompts:
    return Prompts.of(texts, Characters(), width)


def adapter(seed: int = 0) -> torch.Tensor:
    """An adapter away from the start, where A has a gradient too."""
    return policy().start + 0.1 * torch.randn(policy().factors.size, generator=torch.Generator().manual_seed(seed))


def computed(it: LanguageLearner, texts: list[str], width: int = 10, present: torch.Tensor | None = None) -> Any:
    rollouts = it.respond(adapter(), prompts(texts, width), it.uniforms(USERS, FOUR))
    return rollouts, it.updates(adapter(), rollouts, -0.5, present)


def stream(texts: list[str] = TEXTS * 2, absent: tuple[int, ...] = ()) -> Stream:
    """Users in two updates of four."""
    present = torch.tensor([row not in absent for row in range(len(texts))])
    return Stream(np.arange(len(texts)), prompts(texts), np.arange(len(texts)) // 4, present)


def left(users: Stream, *gone: int) -> Stream:
    """The same users without some, whose rows are not there at all."""
    kept = [row for row in range(len(users.keys)) if row not in gone]
    return Stream(users.keys[kept], users.prompts[kept], users.updates[kept], users.present[kept])


def trained(
    directory: Path, it: LanguageLearner, users: Stream, entropy: Any = None, run_id: str = "a run"
) -> tuple[LanguageState, list[Figures]]:
    header = RunHeader("dppg", "dppg", "certified", None, 1e-5, "prompt", 8, run_id=run_id)
    public = prompts(["Simulated", "Nobody"])
    return train(it, users, public, public, header, directory, entropy or OsEntropy())


@pytest.mark.parametrize("changed", FOUR)
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_a_users_prompt_moves_that_users_row_alone(changed: int, weight: float) -> None:
    it, other = learner(prompt_weight=weight), list(TEXTS)
    other[changed] = "Somebody else with a long prompt"
    before, first = computed(it, TEXTS)
    after, second = computed(it, other)
    rest = [user for user in FOUR if user != changed]
    assert torch.equal(before.ids[rest], after.ids[rest])
    assert torch.equal(before.rewards[rest], after.rewards[rest])
    torch.testing.assert_close(first[rest], second[rest], rtol=0, atol=1e-7)
    assert not torch.allclose(first[changed], second[changed])


def test_a_reward_gets_each_users_own_prompt_and_continuation() -> None:
    """Another user's prompt would decide the reward, and one user would move two updates."""
    heard: list[tuple[str, str]] = []

    class Reads:
        def scores(self, asked: Sequence[str], said: Sequence[str]) -> torch.Tensor:
            heard.extend(zip(asked, said, strict=True))
            return torch.zeros(len(said))

    LanguageLearner(policy(), Reads(), learner().method, learner().bandit).respond(
        adapter(), prompts(TEXTS), learner().uniforms(USERS, FOUR)
    )
    ids, _, valid = policy().sample(adapter(), prompts(TEXTS), learner().uniforms(USERS, FOUR))
    own = [row[keep].tolist() for row, keep in zip(ids[:, -6:], valid, strict=True)]
    assert heard == [(text[:10], said) for text, said in zip(TEXTS, Characters().batch_decode(own), strict=True)]


def test_padding_changes_no_number() -> None:
    texts = [text[:8] for text in TEXTS]
    for weight in (0.0, 1.0):
        narrow, first = computed(learner(prompt_weight=weight), texts, width=8)
        wide, second = computed(learner(prompt_weight=weight), texts, width=16)
        assert torch.equal(narrow.ids[:, -6:], wide.ids[:, -6:])
        torch.testing.assert_close(narrow.rewards, wide.rewards)
        # Adam's first step depends on signs, which rounding may flip for a gradient near 0.
        assert float((first - second).norm(dim=1).max()) < 0.05 * float(first.norm(dim=1).min())


def test_no_batch_is_without_padding() -> None:
    """Without padding in every batch, one short prompt could make an accelerator use another kernel for all users."""
    assert not prompts([text.ljust(30) for text in TEXTS]).mask.all(dim=1).any()


def test_a_continuation_is_what_the_whole_model_would_say_token_by_token() -> None:
    it, uniforms = learner(), learner().uniforms(USERS, FOUR)
    rollouts = it.respond(adapter(), prompts(TEXTS), uniforms)
    peft = policy().peft(adapter())
    for row, text in enumerate(TEXTS):
        ids = torch.tensor([Characters()([text])["input_ids"][0][:10]])
        for step in range(6):
            law = peft(input_ids=ids, use_cache=False).logits[0, -1].double().softmax(dim=-1).detach()
            token = int((law.cumsum(dim=-1) <= uniforms[row, step]).sum())
            assert int(rollouts.ids[row, 11 + step]) == token
            assert float(rollouts.old_log_probabilities[row, step]) == pytest.approx(float(law[token].log()), abs=1e-4)
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)


def test_nothing_counts_after_the_end_of_text() -> None:
    rollouts = learner().respond(
        adapter(), prompts(TEXTS), torch.zeros(4, 6)
    )  # uniforms of 0 draw the first token, which is the end of text
    assert rollouts.continuation_mask.tolist() == [[True] + [False] * 5] * 4
    assert not rollouts.scores.any()
    assert rollouts.mask[:, 11:].tolist() == [[1] + [0] * 5] * 4


@pytest.mark.parametrize("weight", [0.0, 0.7])
def test_the_loss_of_all_users_is_each_ones_own_by_plain_autograd(weight: float) -> None:
    it = learner()
    rollouts = it.respond(adapter(), prompts(TEXTS), it.uniforms(USERS, FOUR))
    gains = torch.tensor([0.5, -1.0, 0.25, 1.0])
    own = torch.stack([adapter(seed) for seed in FOUR]).requires_grad_()
    data = (rollouts.ids, rollouts.mask, rollouts.continuation_mask, rollouts.old_log_probabilities, gains)
    losses = bandit_loss(policy(), weight)(own, tuple(part[:, None] for part in data), torch.ones(4, 1))
    (found,) = torch.autograd.grad(losses.sum(), own)
    for row in FOUR:
        kept = rollouts.mask[row].bool()
        ids, count = rollouts.ids[row][kept][None], int(rollouts.continuation_mask[row].sum())
        peft = policy().peft(own[row].detach())
        logs = peft(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(dim=-1)
        logs = logs.gather(-1, ids[0, 1:, None])[:, 0]
        ratio = (logs[-count:] - rollouts.old_log_probabilities[row, :count]).exp().mean()
        expected = -ratio * gains[row] - weight * logs[:-count].mean()
        parameters = [parameter for parameter in peft.parameters() if parameter.requires_grad]
        gradient = torch.cat([part.flatten() for part in torch.autograd.grad(expected, parameters)])
        assert losses[row].item() == pytest.approx(expected.item(), abs=1e-5)
        torch.testing.assert_close(found[row], gradient, rtol=1e-3, atol=1e-6)


def test_the_penalty_is_zero_at_the_start_and_positive_elsewhere() -> None:
    it, start = learner(), policy().start
    rollouts = it.respond(start, prompts(TEXTS), it.uniforms(USERS, FOUR))
    torch.testing.assert_close(rollouts.log_ratios, torch.zeros(4))
    assert torch.equal(rollouts.rewards, rollouts.scores)
    assert it.evaluate(start, prompts(TEXTS), 0).kl == pytest.approx(0, abs=1e-12)
    assert it.evaluate(adapter(), prompts(TEXTS), 0).kl > 1e-4


@given(st.text())
def test_a_score_is_in_its_range(text: str) -> None:
    assert -1 <= CLINICAL.score(text) <= 1
    assert CLINICAL.score("") == 0


def test_rewards_are_clipped() -> None:
    for weight in (0.0, 1e6):
        rollouts, _ = computed(learner(kl_weight=weight), TEXTS)
        assert float(rollouts.rewards.abs().max()) <= 1


def test_updates_are_clipped_and_nobody_adds_nothing() -> None:
    it, present = learner(learning_rate=10.0), torch.tensor([True, False, True, True])
    _, everybody = computed(it, TEXTS)
    _, three = computed(it, TEXTS, present=present)
    assert float(everybody.norm(dim=1).max()) <= 0.1 * (1 + 1e-6)
    assert not three[1].any()
    assert torch.equal(three[present], everybody[present])


def test_a_user_whose_numbers_are_not_finite_adds_nothing() -> None:
    it = learner()
    rollouts = it.respond(adapter(), prompts(TEXTS), it.uniforms(USERS, FOUR))
    bad = replace(rollouts, rewards=rollouts.rewards.clone().index_fill_(0, torch.tensor([2]), math.nan))
    updates, good = it.updates(adapter(), bad, 0.0), it.updates(adapter(), rollouts, 0.0)
    assert not updates[2].any()
    assert torch.equal(updates[[0, 1, 3]], good[[0, 1, 3]])


@pytest.mark.parametrize("other", ["absent", "removed", "joined", "replaced"])
def test_one_user_moves_a_noiseless_update_by_the_sensitivity_at_most(tmp_path: Path, other: str) -> None:
    """The bound is S / K for one who leaves or joins, which the ledger prices, and twice that for another user."""
    there = torch.ones(9, dtype=torch.bool)
    users = {
        "absent": stream(absent=(2,)),
        "removed": left(stream(), 2),
        "joined": Stream(
            np.array([*range(8), 99]), prompts([*TEXTS * 2, "Fay"]), np.array([0] * 4 + [1] * 4 + [0]), there
        ),
        "replaced": stream([*TEXTS[:2], "Quite another", TEXTS[3], *TEXTS]),
    }[other]
    one, two = (
        trained(tmp_path / name, learner(), crowd)[0].means[0] for name, crowd in (("one", stream()), ("two", users))
    )
    bound = 0.1 / 4 * (2 if other == "replaced" else 1)
    assert 0 < float((one - two).norm()) <= bound * (1 + 1e-5)


class Recorded(LanguageLearner):
    """A learner that records the update of every user who takes part, in order."""

    seen: list[torch.Tensor]

    def updates(self, vector: Any, rollouts: Any, baseline: float, present: Any = None) -> torch.Tensor:
        rows = super().updates(vector, rollouts, baseline, present)
        if present is not None:
            assert len(rows) == self.bandit.users, "always of one shape"
            self.seen.extend(rows[present])
        return rows


def recorded(directory: Path, users: Stream) -> dict[int, torch.Tensor]:
    """The update of each user of a run's only update."""
    plain = learner()
    it = Recorded(plain.policy, plain.reward, plain.method, replace(plain.bandit, updates=1))
    it.seen = []
    trained(directory, it, users)
    return dict(zip(users.keys.tolist(), it.seen, strict=True))


@pytest.mark.one_case("0", "2", "5")
@pytest.mark.parametrize("gone", range(6))
def test_one_who_leaves_moves_no_other_users_numbers(gone: int, tmp_path: Path) -> None:
    """Not their update, their tokens or the shapes they are computed in, though six come where four are expected."""
    texts, there = [*TEXTS, "Eve", "Finn: J3"], torch.ones(6, dtype=torch.bool)
    users = Stream(np.arange(6), prompts(texts), np.zeros(6, dtype=np.int64), there)
    before, after = recorded(tmp_path / "before", users), recorded(tmp_path / "after", left(users, gone))
    assert set(before) - set(after) == {gone}
    for one, row in after.items():
        torch.testing.assert_close(row, before[one], rtol=0, atol=1e-7)


def test_an_update_to_which_nobody_comes_is_noise_alone(tmp_path: Path) -> None:
    """1,280 normals: the deviation is within 10 % (5 sigma)."""
    state, _ = trained(tmp_path, learner(noise=2.0), left(stream(), 0, 1, 2, 3))
    assert list(state.means) == [0, 1]
    assert float(state.means[0].std()) == pytest.approx(2.0 * 0.1 / 4, rel=0.1)


class Watched(LanguageLearner):
    """A learner that sets the reward of user 2, and records the inputs and results of updates."""

    earned = 0.0

    def respond(self, vector: Any, prompts: Any, uniforms: Any) -> Any:
        found = super().respond(vector, prompts, uniforms)
        if len(prompts) == len(TEXTS):  # these are users; there are fewer simulated users
            found.rewards[2] = self.earned
        return found

    def updates(self, vector: Any, rollouts: Any, baseline: float, present: Any = None) -> torch.Tensor:
        rows = super().updates(vector, rollouts, baseline, present)
        self.seen = [vector, baseline, rows]
        return rows


def test_what_a_user_earns_moves_nothing_that_others_compute_with(tmp_path: Path) -> None:
    """A baseline of the users' own rewards, for example, would let each user move all updates, unclipped."""
    seen = []
    for reward in (-1.0, 1.0):
        plain = learner()
        it = Watched(plain.policy, plain.reward, plain.method, replace(plain.bandit, updates=1))
        it.earned = reward
        header = RunHeader("dppg", "dppg", "certified", None, 1e-5, "prompt", 4)
        public = prompts(["Simulated", "Nobody"])
        train(it, stream(TEXTS), public, public, header, tmp_path / str(reward), OsEntropy())
        seen.append(it.seen)
    (vector, baseline, rows), (vector_then, baseline_then, rows_then) = seen
    assert torch.equal(vector, vector_then)
    assert baseline == baseline_then
    assert torch.equal(rows[[0, 1, 3]], rows_then[[0, 1, 3]])
    assert not torch.allclose(rows[2], rows_then[2])


def test_the_ledgers_epsilon_is_the_exact_gaussian_of_one_update(tmp_path: Path) -> None:
    state, points = trained(tmp_path, learner(noise=1.0), stream())
    contents = read_ledger(tmp_path / "ledger.jsonl")
    assert contents.releases == len(state.means) == 2
    assert contents.complete
    assert contents.epsilons.certified == pytest.approx(4.3772, abs=5e-4)
    epsilon = contents.epsilons.certified  # Balle and Wang 2018, theorem 8, with mu = 1
    assert norm.cdf(0.5 - epsilon) - math.exp(epsilon) * norm.cdf(-0.5 - epsilon) == pytest.approx(1e-5, rel=0.01)
    assert [point.updates for point in points] == [0, 1, 2]
    assert trained(tmp_path, learner(noise=1.0), stream())[1] == points  # a finished run is only read


def test_without_noise_nothing_is_certified(tmp_path: Path) -> None:
    trained(tmp_path, learner(), stream())
    assert read_ledger(tmp_path / "ledger.jsonl").epsilons.certified == math.inf


def test_the_noise_is_z_radii_over_the_users(tmp_path: Path) -> None:
    """Nobody takes part, so a mean is noise alone: the deviation of 2 x 1,280 normals is within 7 % (5 sigma)."""
    state, _ = trained(tmp_path, learner(noise=2.0), stream(absent=tuple(range(8))))
    assert float(torch.stack(list(state.means.values())).std()) == pytest.approx(2.0 * 0.1 / 4, rel=0.07)


def test_a_charged_update_that_died_is_not_made_again(tmp_path: Path) -> None:
    class Dying(OsEntropy):
        def words(self, count: int) -> NDArray[np.uint64]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, learner(noise=1.0), stream(), Dying())
    assert read_ledger(tmp_path / "ledger.jsonl").releases == 1  # the charge is on disk, and no noise was drawn
    state, _ = trained(tmp_path, learner(noise=1.0), stream())
    assert list(state.means) == [1]
    assert read_ledger(tmp_path / "ledger.jsonl").releases == 2


def test_a_run_is_not_resumed_under_another_id(tmp_path: Path) -> None:
    """Users are dealt by it, so that some would be in two updates."""
    trained(tmp_path, learner(noise=1.0), stream())
    with pytest.raises(ConfigError, match=r"header\.run_id: is 'another', and the run in .* began as 'a run'"):
        trained(tmp_path, learner(noise=1.0), stream(), run_id="another")


def test_the_adapters_that_users_met_follow_from_the_releases(tmp_path: Path) -> None:
    state, _ = trained(tmp_path, learner(noise=1.0), stream())
    met = adapters_by_update(policy().start, state.means, 1.0)
    assert torch.equal(met[0], policy().start)
    assert torch.equal(met[1] + state.means[1], state.adapter)


def test_ranks_and_scalings_of_single_layers_are_pefts() -> None:
    lora = Lora(4, 8, 0.0, "all-linear", rslora=True, rank_pattern={"c_fc": 2}, alpha_pattern={"c_attn": 3})
    peft = attach_lora(gpt2(), lora, 0).eval()
    write_adapters(peft, 0.3 * torch.randn(Factors.of(peft).size, generator=torch.Generator().manual_seed(1)))
    plain, ids = gpt2().eval(), torch.tensor([[3, 1, 4, 1, 5]])
    with Factors.of(peft).stack(flat_adapters(peft)[None]).apply(plain, torch.tensor([0])):
        found = plain(input_ids=ids).logits
    torch.testing.assert_close(found, peft(input_ids=ids).logits, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, plain(input_ids=ids).logits, atol=1e-3)


def test_peft_loads_the_adapter_and_says_the_same(tmp_path: Path) -> None:
    save_adapter(policy().peft(adapter()), tmp_path)
    loaded = PeftModel.from_pretrained(deepcopy(policy().model), str(tmp_path)).eval()
    some = prompts([text.ljust(10) for text in TEXTS])
    own = policy().logits(adapter()[None], some.ids, some.mask, 10)
    said = loaded(
        input_ids=some.ids[:, 1:], use_cache=False
    ).logits  # without the first column, which is always padding
    torch.testing.assert_close(said, own, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(own, policy().logits(None, some.ids, some.mask, 10), atol=1e-3)


def test_the_radius_is_the_trust_regions() -> None:
    bandit = Bandit(users=8, trust=0.01)
    assert bandit.clip_radius(1.0, 4610) == pytest.approx(0.0163313, rel=1e-5)  # spec, section 4
    assert bandit.clip_radius(0.0, 4610) == pytest.approx(math.sqrt(0.02))
    assert replace(bandit, radius=0.3).clip_radius(1.0, 4610) == 0.3


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Bandit(users=0), "users"),
        (lambda: Bandit(radius=-1.0), "radius"),
        (lambda: Bandit(kl_weight=-0.1), "kl_weight"),
        (lambda: Bandit(learning_rate=math.inf), "learning_rate"),
        (lambda: LanguageLearner(policy(), LETTERS, Dppg(noise_multiplier=1.0), Bandit()), "critic"),
        (lambda: LanguagePolicy(gpt2(), Characters(), Lora(dropout=0.1), 0), "lora.dropout"),
        (lambda: Stream(np.array([1, 2]), prompts(TEXTS), np.zeros(4, int), torch.ones(4)), "users"),
    ],
)
def test_what_cannot_be_is_named(make: Any, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.field == field
