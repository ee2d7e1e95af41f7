"""Noisy steps of every mechanism, as they were when they were first written down: a change of code moves none of them.

Fixed entropy, third step (geoclip: the first). To rounding, for machines differ in their last bit; other noise would be
nowhere near.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from mechanism_steps import batch_of, observed, privatised, started

from dptune.mechanisms.registry import MECHANISMS

#: The first coordinate of the noisy sums, and the sum of all.
KNOWN = {
    "adaclip": (1.46254444, 1.80273533),
    "auto_s": (1.46180248, 1.79334831),
    "banded": (2.52749538, 5.56276798),
    "autoclip_published": (3.18109727, 4.63990319),
    "dc_sgd_e": (4.49606323, 5.39973956),
    "dc_sgd_p": (1.78221679, 2.17755608),
    "dp_lora": (1.28638935, 2.25610542),
    "dp_lora_fed": (1.46079922, 1.79293156),
    "geoclip": (0.852855742, 9.74574448),
    "laplace": (2.33610821, 2.28916645),
    "lmo_dp": (2.62567306, 2.88811088),
    "nonprivate": (-1.01596022, -0.0124819055),
    "per_pair": (1.28638935, 2.25610542),
    "plrvo": (2.33991098, 2.60963625),
    "psac": (1.4669981, 1.81221962),
    "quantile": (1.60461056, 1.95338458),
    "rldp": (0.0969837159, 0.199700054),
    "rldp_published": (0.0969837159, 0.199700054),
    "static": (1.46079922, 1.79293156),
}
#: Three bands: with one, `banded` adds the same independent noise as `static`.
OPTIONS: dict[str, dict[str, Any]] = {"banded": {"bands": 3}}
#: Equal eigenvalues leave geoclip's directions to the machine's linear algebra, from the first update of them on.
LAST_STEP = {"geoclip": 1}


def test_every_mechanism_is_known() -> None:
    assert set(KNOWN) == set(MECHANISMS), "KNOWN wants the two numbers of a new mechanism, as the next test finds them"


@pytest.mark.parametrize("name", KNOWN)
def test_the_same_entropy_gives_the_same_noisy_step(name: str) -> None:
    mechanism, rng = started(name, **OPTIONS.get(name, {})), np.random.default_rng(7)
    for step in range(1, 1 + LAST_STEP.get(name, 3)):
        batch = batch_of(rng.standard_normal((4, 8)), rng.standard_normal(4))
        released = privatised(mechanism, [batch], seed=step, row=step - 1)
        mechanism.controller.observe(observed(released, step))
    flat = torch.cat(released.blocks).double()
    assert (float(flat[0]), float(flat.sum())) == pytest.approx(KNOWN[name], rel=1e-5, abs=1e-6)
