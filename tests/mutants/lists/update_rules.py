"""Update rules: what they read besides releases, and what a resumed run goes on with."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

RUN = "dptune/training/run.py"
CHECKPOINTS = "dptune/training/checkpoints.py"
TESTS = "tests/training/test_optimizers.py"
RESUMED = (f"{TESTS}::test_a_run_stopped_three_times_ends_with_the_weights_of_an_unbroken_one",)
RESTORED = "key: value if value.ndim == 0 else value.to(parameter.device) for key, value in state.items()"

MUTANTS = (
    Mutant(
        "adam_bc_divides_by_how_many_were_drawn",
        "a private count would move the weights",
        RUN,
        "[len(pair.parameters) for pair in run.pairs], plan.expected_batch_size)",
        "[len(pair.parameters) for pair in run.pairs], max(1.0, float(len(step.batch))))",
        (f"{TESTS}::test_adam_bc_is_told_of_noise_and_never_of_how_many_were_drawn",),
    ),
    Mutant(
        "mean_forgotten_by_a_resumed_run",
        "the delivered weights would be a mean of the last steps alone",
        CHECKPOINTS,
        RESTORED,
        RESTORED + ' if not key.startswith("average")',
        RESUMED,
    ),
    Mutant(
        "noise_forgotten_by_a_resumed_run",
        "adam_bc would take out less noise than there is",
        CHECKPOINTS,
        RESTORED,
        RESTORED.replace("value if value.ndim == 0", 'value * (key != "noise_sq") if value.ndim == 0'),
        RESUMED,
    ),
    Mutant(
        "momentum_forgotten_by_a_resumed_run",
        "a killed run would be another run",
        CHECKPOINTS,
        RESTORED,
        RESTORED.replace("value.to(parameter.device)", 'value.to(parameter.device) * (key != "momentum_buffer")'),
        RESUMED,
    ),
    Mutant(
        "rate_of_the_step_and_not_of_the_release",
        "after a kill the rate would not have fallen when the budget ends",
        RUN,
        "plan.learning_rate_at(run.step, step.row)",
        "plan.learning_rate_at(run.step)",
        (f"{TESTS}::test_the_rate_of_a_step_is_that_of_its_release_in_the_ledger",),
    ),
)
