"""Samples of a public model at a high temperature, which audit canaries say.

A canary is found by its own direction: by how far the weights moved along its gradient. So canaries need gradients that
differ from one another, and from those of records. Texts that the model finds a little unlikely have such gradients;
likely texts have small ones, and those of tokens that the model never learned lie close together (measured in
docs/findings/audits.md).
"""

from __future__ import annotations

from typing import Any

import torch

from dptune.training.models.causal import evaluation_mode

TEMPERATURE = 1.5
#: Most tokens of a sample.
TOKENS = 128
_ROWS, _LEAST = 128, 8  # rows of a batch; characters of the shortest text


@torch.no_grad()
def sampled_texts(
    model: Any, tokenizer: Any, count: int, *, temperature: float = TEMPERATURE, tokens: int = TOKENS, seed: int = 0
) -> list[str]:
    """Sample at most ``count`` distinct texts from a public causal model, started by its end-of-text token.

    The model decides them, and nothing else does; they depend on no private record. There are fewer than ``count`` if
    the model repeats itself. Characters that cannot be printed are left out, such as pieces of UTF-8.

    Args:
        model: causal language model on its device.
        temperature: divisor of the logits.
        tokens: most tokens of a text.
        seed: public.
    """
    device, found = next(model.parameters()).device, dict[str, None]()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), evaluation_mode(model):
        torch.manual_seed(seed)
        before = -1
        while before < len(found) < count:  # until a batch has nothing new: a model may repeat itself
            before = len(found)
            start = torch.full((_ROWS, 1), tokenizer.eos_token_id, device=device)
            drawn = model.generate(
                input_ids=start,
                attention_mask=torch.ones_like(start),
                do_sample=True,
                temperature=temperature,
                top_k=0,
                top_p=1.0,
                max_new_tokens=tokens,
                pad_token_id=tokenizer.pad_token_id,
            )
            texts = tokenizer.batch_decode(drawn[:, 1:], skip_special_tokens=True, clean_up_tokenization_spaces=False)
            printable = ("".join(filter(str.isprintable, text.replace("\ufffd", ""))).strip() for text in texts)
            found |= dict.fromkeys(text for text in printable if len(text) >= _LEAST)
    return list(found)[:count]
