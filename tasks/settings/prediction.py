"""The section `prediction`: ensembles on disjoint shards, and the protocols that answer from them."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator, Field, model_validator

from dptune.core.declarations import Chance, Count, Epsilon, Rows
from dptune.core.settings import RECORD, ShardTuning
from tasks.settings.strict import LibrarySection, StrictModel, Unit

#: DVC's ``--set-param`` writes inf as a number.
Order = Annotated[
    Annotated[float, Ge(1 + 1e-6), Le(1e6)] | Literal["auto", "inf"],
    BeforeValidator(lambda given: "inf" if given == math.inf else given),
]


class Serve(StrictModel):
    """The protocol that `dptune generate` and `dptune serve` answer by.

    Attributes:
        epsilon: budget of all answers together.
        tokens: number of tokens that may ever be answered.
        models: number of slots of the ensemble; one of ``prediction.models``.
        public_weight: least weight of the public model.
        unit: unit whose change the budget bounds: shard, record, or what ``partition`` names.
    """

    epsilon: Epsilon
    tokens: Count
    models: Count
    public_weight: Chance
    unit: Unit | Literal["shard"]


class Prediction(StrictModel):
    """Private prediction: ensembles, and the protocols that are compared.

    Attributes:
        models: numbers of slots; each tunes one ensemble. Empty: no private prediction.
        partition: unit whose records stay in one shard: record, or the column of ``data.unit``.
        tuning: training of every shard's adapter.
        alpha: Renyi order; "auto" is ceil(4 log(1 / delta) / (3 epsilon) + 1). Several are compared at each epsilon,
            and the first is served. "inf" is scored for the published protocol alone, which then asks all models.
        epsilons: budgets to compare.
        tokens: numbers of tokens that a budget must last for.
        public_weights: least weights of the public model, of the provable variant.
        units: units whose change the budgets bound: shard, record, or what ``partition`` names.
        subsamples: sampling rates of the published protocol, whose theorem does not hold.
        with_replacement: whether the published protocol draws its sample as the authors' code does.
        records: number of held-out records that protocols are scored on.
        serve: protocol of `dptune generate` and `dptune serve`.
    """

    models: tuple[Annotated[int, Ge(1), Le(10**5)], ...]
    partition: Unit
    tuning: Annotated[ShardTuning, LibrarySection(("epochs", "batch_size", "learning_rate", "seed"))]
    alpha: Order | Annotated[tuple[Order, ...], Field(min_length=1)]
    epsilons: Annotated[tuple[Epsilon, ...], Field(min_length=1)]
    tokens: Annotated[tuple[Count, ...], Field(min_length=1)]
    public_weights: tuple[Chance, ...]
    units: tuple[Unit | Literal["shard"], ...]
    subsamples: tuple[Annotated[float, Gt(0), Le(1)], ...]
    with_replacement: bool
    records: Rows
    serve: Serve

    @model_validator(mode="after")
    def _consistent(self) -> Prediction:
        if self.models and self.serve.models not in self.models:
            raise ValueError(f"serve.models: {self.serve.models} is not one of the numbers under models")
        for unit in (*self.units, self.serve.unit):
            if unit not in ("shard", RECORD, self.partition):
                problem = f"by {self.partition}, a {unit} is in many shards"
                raise ValueError(f"units: {unit} needs partition: {unit}; {problem}")
        return self

    def alphas_at(self, epsilon: float, delta: float) -> tuple[float, ...]:
        """The Renyi orders: as given, or ceil(4 log(1/delta) / (3 epsilon) + 1), the rule of PMixED's ablation."""
        given = self.alpha if isinstance(self.alpha, tuple) else (self.alpha,)
        rule = float(math.ceil(4 * math.log(1 / delta) / (3 * epsilon) + 1))
        words = {"auto": rule, "inf": math.inf}
        return tuple(dict.fromkeys(words[alpha] if isinstance(alpha, str) else alpha for alpha in given))
