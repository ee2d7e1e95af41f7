"""Bounds of numbers in settings, as annotations of their types.

A settings dataclass writes a field's name, type, default and bounds once; what reads settings from a file (params.yaml)
checks the bounds that it finds there. The upper bounds are far above anything that fits on a machine, and below what
overflows in a library: a number beyond one is a slip of the keyboard.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

_LARGEST = 1e300

#: A seed of public random numbers. torch, NumPy and transformers all take these, and the next few above.
Seed = Annotated[int, Ge(0), Le(2**31 - 1)]
Positive = Annotated[float, Gt(0), Le(_LARGEST)]
NotNegative = Annotated[float, Ge(0), Le(1e9)]
#: Number of times that something is done, or 0 where it need not be.
Count = Annotated[int, Ge(1), Le(10**9)]
CountOrZero = Annotated[int, Ge(0), Le(10**9)]
#: Rows of a table, or samples, of which all are held in memory.
Rows = Annotated[int, Ge(1), Le(10**7)]
TokenCount = Annotated[int, Ge(1), Le(10**6)]
#: Numbers of what takes time each: updates, users, tokens.
Few = Annotated[int, Ge(1), Le(10**6)]
FewOrZero = Annotated[int, Ge(0), Le(10**6)]
#: A probability or share that is neither 0 nor 1, and one that may be either.
Chance = Annotated[float, Gt(0), Lt(1)]
Share = Annotated[float, Ge(0), Le(1)]
Rank = Annotated[int, Ge(1), Le(4096)]
Epochs = Annotated[float, Ge(1e-6), Le(1e6)]
Epsilon = Annotated[float, Ge(1e-6), Le(1e6)]
Delta = Annotated[float, Ge(1e-30), Lt(1)]
#: 10 would already throw any weights away; a run at 1e30 trains, diverges and has spent its budget.
LearningRate = Annotated[float, Gt(0), Le(10)]
