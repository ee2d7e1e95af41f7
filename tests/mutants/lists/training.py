"""The private step: its order, its divisor, and what leaves it."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

RUN = "dptune/training/run.py"
OPENING = "dptune/training/opening.py"
PER_SAMPLE = "dptune/training/per_sample.py"
LOOP = "tests/training/test_loop.py"
CHARGE = "self.ledger.charge(mechanism.release(knobs, plan.sample_rate))"
DRAW = "self.own_units.draw(plan.sample_rate, self.entropy)"

MUTANTS = (
    Mutant(
        "rehearsal_of_one_row",
        "a layer that mixes all records but the first would be trained",
        "dptune/training/rehearsal.py",
        "for row, expected in enumerate(alone):",
        "for row, expected in enumerate(alone[:1]):",
        ("tests/training/test_rehearsal.py::test_a_layer_whose_rows_are_mixed_is_refused_before_a_charge",),
    ),
    Mutant(
        "charge_after_draw",
        "a process that dies between the two has used coins that no ledger holds",
        RUN,
        CHARGE,
        f"drawn = {DRAW}\n        {CHARGE}",
        (f"{LOOP}::test_every_step_is_on_the_disk_before_its_coins_and_its_noise",),
    ),
    Mutant(
        "a_second_run_goes_on_from_the_first",
        "weights and radii that another run's releases moved would be certified by a ledger without them",
        RUN,
        "mark_used(self.spec, self.ledger.header.run_id)",
        "pass",
        (f"{LOOP}::test_what_another_run_has_trained_is_refused_before_anything_is_charged",),
    ),
    Mutant(
        "empty_batches_for_free",
        "whether a batch was empty is itself released",
        RUN,
        CHARGE,
        f"if {DRAW}:\n            {CHARGE}",
        (f"{LOOP}::test_empty_batches_are_charged_and_noised",),
    ),
    Mutant(
        "divided_by_the_realised_batch",
        "the size of a Poisson batch is private, and one unit more would scale all others",
        RUN,
        "privatise(batches, zeros, knobs, plan.expected_batch_size, run.entropy",
        "privatise(batches, zeros, knobs, float(max(1, len(step.batch))), run.entropy",
        (f"{LOOP}::test_p06_the_divisor_is_the_expected_batch_size",),
    ),
    Mutant(
        "drawn_at_twice_the_rate",
        "the ledger would be told half of the true sampling rate",
        RUN,
        DRAW,
        "self.own_units.draw(min(1.0, 2 * plan.sample_rate), self.entropy)",
        ("tests/training/test_loop.py::test_every_step_is_on_the_disk_before_its_coins_and_its_noise",),
    ),
    Mutant(
        "charged_at_half_the_rate",
        "the ledger would be told half of the true sampling rate",
        RUN,
        CHARGE,
        "self.ledger.charge(mechanism.release(knobs, plan.sample_rate / 2))",
        (f"{LOOP}::test_p07_each_step_is_charged_once_with_what_it_used",),
    ),
    Mutant(
        "charged_with_other_knobs",
        "the ledger would hold the noise that the controller wanted, not what the filter allowed",
        RUN,
        CHARGE,
        "self.ledger.charge(mechanism.release(mechanism.knobs(), plan.sample_rate))",
        (
            "tests/training/test_filtered_run.py::test_a_moving_sigma_never_passes_the_budget_and_makes_every_planned_release",
        ),
    ),
    Mutant(
        "no_reserve_behind_the_filter",
        "a greedy controller would leave later steps nothing: the run ends early, and when is private",
        RUN,
        "reserve = later * renyi_cost(",
        "reserve = 0.0 * renyi_cost(",
        (
            "tests/training/test_filtered_run.py::test_a_greedy_controller_is_raised_and_still_makes_every_planned_release",
        ),
    ),
    Mutant(
        "planned_steps_beyond_the_ledger",
        "a run that died would make all its steps again, past its plan",
        RUN,
        "if self.ledger.releases >= plan.steps:",
        "if self.step >= plan.steps:",
        ("tests/training/test_resume.py::test_killed_between_steps",),
    ),
    Mutant(
        "dropout_masks_of_a_public_seed",
        "known masks tie the records of a batch together",
        RUN,
        "torch.manual_seed(secrets.randbits(63) if not entropy.leaks else step)",
        "torch.manual_seed(step)",
        (f"{LOOP}::test_a_run_with_dropout_keeps_its_masks_secret",),
    ),
    Mutant(
        "public_loss_of_private_records",
        "controllers that follow the loss on public records would follow that of private ones",
        RUN,
        "sample = replace(run.spec.public, rows=run.spec.public.rows[:_PUBLIC_RECORDS])",
        "sample = replace(run.spec.tokens, rows=run.spec.tokens.rows[:_PUBLIC_RECORDS])",
        ("tests/training/test_observed.py",),
    ),
    Mutant(
        "batch_size_told_as_public",
        "private telemetry would publish how many units were drawn",
        RUN,
        'public = {"learning_rate": learning_rate}',
        'public = {"learning_rate": learning_rate, "batch_units": float(len(step.batch))}',
        (f"{LOOP}::test_public_figures_are_functions_of_releases_alone",),
    ),
    Mutant(
        "norm_without_noise_told_as_public",
        "without noise the sum is as private as the records",
        RUN,
        '(public if mechanism.private else private)["gradient_norm"] = norm',
        'public["gradient_norm"] = norm',
        (f"{LOOP}::test_public_figures_are_functions_of_releases_alone",),
    ),
    Mutant(
        "knobs_of_the_next_step_charged_first",
        "what is charged must be what the step uses",
        RUN,
        "return Step(knobs, *parted(self.own_units.draw(",
        "return Step(mechanism.knobs(), *parted(self.own_units.draw(",
        (
            "tests/training/test_filtered_run.py::test_a_greedy_controller_is_raised_and_still_makes_every_planned_release",
        ),
    ),
    Mutant(
        "raw_gradients_left_on_the_parameters",
        "whoever looks at the model after a step would see what it was",
        RUN,
        "optimizer.zero_grad(set_to_none=True)",
        "pass",
        (f"{LOOP}::test_no_raw_gradient_stays_on_the_parameters",),
    ),
    Mutant(
        "expected_batch_of_another_rate",
        "the divisor would not be that of the rate which is charged",
        OPENING,
        "if not math.isclose(plan.sample_rate * len(units), plan.expected_batch_size):",
        "if False:",
        (f"{LOOP}::test_a_divisor_that_does_not_belong_to_the_sample_rate_is_refused",),
    ),
    Mutant(
        "guessable_dropout_masks",
        "on a CPU a seed of 32 bits can be tried through",
        OPENING,
        "if on_cpu and spec.mechanism.private and not spec.header.leaks and uses_dropout(spec.model):",
        "if False:",
        (f"{LOOP}::test_certified_runs_with_guessable_dropout_masks_are_refused",),
    ),
    Mutant(
        "every_rank_draws_everybody",
        "a unit would be drawn by each rank, and count as often",
        OPENING,
        "RankRun(spec, pairs, units.part(ranks.rank, ranks.world), entropy",
        "RankRun(spec, pairs, units, entropy",
        ("tests/training/test_ranks.py::test_two_processes_make_the_run_that_one_makes",),
    ),
    Mutant(
        "raw_statistics_over_ranks",
        "a leaky controller would see a part of the batch, and nobody would say so",
        "dptune/training/ranks.py",
        "if self.world > 1 and mechanism.controller.raw_inputs:",
        "if False:",
        ("tests/training/test_ranks.py::test_a_controller_that_reads_the_raw_batch_is_refused",),
    ),
    Mutant(
        "a_broken_unit_spreads",
        "one record's NaN would be everybody's release",
        PER_SAMPLE,
        "group.masked_fill_(broken[:, None, None], 0.0)",
        "pass",
        ("tests/mechanisms/test_clipping.py::test_a_unit_that_is_not_finite_is_dropped_and_does_not_spread",),
    ),
    Mutant(
        "norms_in_float32",
        "the norm of a long gradient would be short by more than the margin",
        PER_SAMPLE,
        "torch.linalg.vector_norm(group, dim=2, dtype=torch.float64)",
        "torch.linalg.vector_norm(group, dim=2).double()",
        ("tests/mechanisms/test_clipping.py::test_p01_the_radius_holds_at_the_width_of_real_adapters",),
    ),
    Mutant(
        "weights_outside_the_pairs",
        "a weight in no pair would train without privacy",
        PER_SAMPLE,
        "if parameter.requires_grad and id(parameter) not in covered:",
        "if False:",
        ("tests/training/test_per_sample.py::test_a_trainable_parameter_outside_the_pairs_is_refused",),
    ),
    Mutant(
        "a_client_bounded_record_by_record",
        "the model a client trained would stay, and the next client start from it",
        "dptune/training/federated.py",
        "parameter.copy_(before)",
        "pass",
        ("tests/training/test_federated.py::test_the_model_is_left_bit_for_bit_as_it_was_even_when_a_client_fails",),
    ),
)
