"""Audits: what they compare, what they attack, and whose coins they read."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DRAW = "dptune/audit/draw.py"
STEP = "dptune/audit/step.py"
TASK = "tasks/audit/attacks.py"
CRAFTED = "tasks/experiment/crafted.py"
ERRORS = "tests/audit/test_drawn_batches.py::test_an_error_in_the_draw_is_found_in_nearly_every_audit"
AUDITED = "tests/tasks/test_audit.py"

MUTANTS = (
    Mutant(
        "releases_that_are_no_numbers_pass",
        "a step that nobody could attack would have an audited epsilon of 0",
        "dptune/audit/contract.py",
        "if not wrong and torch.isfinite(",
        "if not wrong or torch.isfinite(",
        (
            "tests/audit/test_plugin_step.py::test_a_part_that_returns_no_vectors_of_numbers_is_named_with_what_it_returned",
        ),
    ),
    Mutant(
        "sizes_may_be_too_even",
        "batches of one size would pass for Poisson samples",
        DRAW,
        "return min(1.0, 2 * float(min(law.cdf(statistic), law.sf(statistic))))",
        "return float(law.sf(statistic))",
        (f"{ERRORS}[fixed]",),
    ),
    Mutant(
        "a_unit_may_be_missing",
        "a record that no batch ever holds would not be missed",
        DRAW,
        "counts = np.bincount(entries, minlength=len(units))[_present(units, owners)]",
        "counts = np.bincount(entries, minlength=len(units))\n    counts = counts[counts > 0]",
        (f"{ERRORS}[without_one]",),
    ),
    Mutant(
        "ties_without_coins",
        "p-values would not be uniform, and sound draws accused",
        DRAW,
        "coins, law = uniform(entropy, len(counts)), binom(trials, rate)",
        "coins, law = np.zeros(len(counts)), binom(trials, rate)",
        ("tests/audit/test_drawn_batches.py::test_p_values_of_the_smallest_counts_are_uniform_too",),
    ),
    Mutant(
        "draw_compared_with_itself",
        "a run that draws at another rate than its ledger holds would be found right",
        TASK,
        "        charged.sample_rate,\n",
        "        min(1.0, bands * rate),\n",
        (f"{AUDITED}::test_a_plan_with_another_rate_than_the_ledgers_is_found_out",),
    ),
    Mutant(
        "draw_of_no_group",
        "a run that draws units out of their turn would be found right",
        TASK,
        "[Turn.of(run_id, bands, row, charged.dealt_by) for row in range(bands)]",
        "[None]",
        (f"{AUDITED}::test_a_draw_that_ignores_the_groups_of_correlated_noise_is_found_out",),
    ),
    Mutant(
        "bench_with_moving_noise",
        "the step of a controller that acts at once would be another than the ledger's",
        STEP,
        "return replace(knobs, noise_multiplier=self.noise_multiplier)",
        "return knobs",
        ("tests/audit/test_step.py::test_the_noise_is_what_the_audit_was_asked_for_whatever_a_controller_does_next",),
    ),
    Mutant(
        "bench_whose_later_steps_move_the_noise",
        "the published agent, which acts on the batch of a trial, would be audited at another noise than the ledger's",
        STEP,
        "        knobs = stage.knobs(mechanism)\n        released = stage.release(mechanism, knobs, attack.scene",
        "        knobs = mechanism.knobs()\n        released = stage.release(mechanism, knobs, attack.scene",
        ("tests/audit/test_step.py::test_the_noise_is_what_the_audit_was_asked_for_whatever_a_controller_does_next",),
    ),
    Mutant(
        "coins_before_the_lock",
        "two processes would plant by the coins of one and be audited by those of the other",
        CRAFTED,
        "    return KeptCanaries(",
        "    write_crafted(one, directory)\n    return KeptCanaries(",
        (f"{AUDITED}::test_coins_are_kept_under_the_ledgers_lock_and_before_the_first_charge",),
    ),
    Mutant(
        "coins_of_another_process",
        "the audit would compare a run with coins that it was not made with",
        CRAFTED,
        "kept = read_crafted(self.run) if releases else self",
        "kept = self",
        (f"{AUDITED}::test_a_run_goes_on_with_its_own_coins_or_not_at_all",),
    ),
    Mutant(
        "banded_audit_of_one_visit",
        "composition would never be attacked",
        "dptune/cli/step_audit.py",
        "audit_rows(built, visits=steps, **common)",
        "audit_rows(built, **common)",
        ("tests/test_cli.py::test_audit_of_correlated_noise_plays_and_prices_as_many_visits_as_it_is_asked_for",),
    ),
    Mutant(
        "banded_thresholds_chosen_on_what_is_counted",
        "bounds would hold less often than they say",
        "dptune/audit/rows.py",
        "    knobs = stage.knobs(stage.mechanism)\n    return StepAudit(",
        "    knobs = stage.knobs(stage.mechanism)\n"
        "    chosen = best_cuts(inside, outside, counted, delta, confidence)\n"
        "    best = _RowAttack(best.scene, best.weights, best.fit, chosen)\n"
        "    return StepAudit(",
        ("tests/audit/test_rows.py::test_thresholds_are_chosen_on_trials_that_are_not_counted",),
    ),
    Mutant(
        "accusation_of_equal_figures",
        "an attack would be said to show 2 where 2 is certified, which accuses nobody",
        "dptune/audit/contrast.py",
        "if float(lower) > float(upper):",
        "if lower and upper:",
        ("tests/audit/test_contrast.py",),
    ),
    Mutant(
        "units_dealt_anew_in_every_row",
        "a unit would be met in rows that share noise",
        "dptune/training/groups.py",
        "hashlib.sha256(run_id.encode())",
        'hashlib.sha256(f"{run_id}, row {row}".encode())',
        ("tests/audit/test_rows.py::test_every_unit_has_one_turn_in_as_many_rows_as_bands",),
    ),
)
