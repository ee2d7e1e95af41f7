"""A tiny GPT-2, its tokenizer, and a secret that it learned by heart: no network, a second in all."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from dptune.records.canaries import suffix
from dptune.training.models.pretrain import train_tokenizer

torch.set_num_threads(1)  # so small that a second thread only waits for the first

LENGTH = 96
RECORD = "The patient is well."
SECRET = "K7Q2ZB90XM"


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level pieces; some of the learned ones span words."""
    return train_tokenizer([RECORD, "The patient has diabetes.", "The patient takes insulin twice a day."] * 3, 290)


def gpt2(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    size = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    end = tokenizer().eos_token_id
    config = GPT2Config(vocab_size=len(tokenizer()), bos_token_id=end, eos_token_id=end, **size, **drop)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)  # a fresh model finds all tokens alike
    return model


@cache
def memorised() -> Any:
    """A model after some plain steps on ``RECORD`` with ``SECRET`` planted."""
    model = gpt2()
    ids = torch.tensor([tokenizer()(RECORD + suffix(SECRET))["input_ids"]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(60):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()
