"""Correlated noise: its rows, their groups, their price, and what a killed process leaves behind."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

BANDED = "dptune/mechanisms/banded.py"
MECHANISM = "dptune/mechanisms/mechanism.py"
PLANNING = "dptune/mechanisms/planning.py"
ROWS = "dptune/privacy/cyclic_rows.py"
LEDGER_FILE = "dptune/privacy/ledger_file.py"
LEDGER = "dptune/privacy/ledger.py"
RELEASE = "dptune/privacy/release.py"
GROUPS = "dptune/training/groups.py"
DATA = "dptune/training/data.py"
RUN = "dptune/training/run.py"
OPENING = "dptune/training/opening.py"
STRATEGY = "dptune/privacy/strategy.py"
BANDED_TESTS = "tests/mechanisms/test_banded.py"
ROW_TESTS = "tests/privacy/test_cyclic_rows.py"
PLANNING_TESTS = "tests/mechanisms/test_planning.py"
GROUP_TESTS = "tests/training/test_cyclic_groups.py"
RANK_TEST = "tests/training/test_ranks.py::test_units_of_a_banded_run_come_in_their_own_rows_on_every_rank"
FRESH_NOISE = "noise = standard_normal(entropy, sum(sizes), sums[0].device)"
KILLS = "tests/training/test_banded_kills.py"

MUTANTS = (
    Mutant(
        "one_noise_for_all_blocks",
        "the difference of two blocks would be exact",
        BANDED,
        FRESH_NOISE,
        "noise = standard_normal(entropy, max(sizes), sums[0].device).repeat(len(sizes))[: sum(sizes)]",
        (f"{BANDED_TESTS}::test_coordinates_share_no_noise_within_a_row_or_across_blocks",),
    ),
    Mutant(
        "two_coordinates_share_their_noise",
        "their difference would be exact",
        BANDED,
        FRESH_NOISE,
        FRESH_NOISE + "; noise[1:2] = noise[0:1]",
        (f"{BANDED_TESTS}::test_coordinates_share_no_noise_within_a_row_or_across_blocks",),
    ),
    Mutant(
        "releases_off_the_grid",
        "the last bits of a release would tell of the exact sum (Mironov 2012)",
        BANDED,
        "noise.split(sizes), list(unit), list(unit))",
        "noise.split(sizes), list(unit), [1e-6 * one for one in unit])",
        (f"{BANDED_TESTS}::test_releases_lie_on_a_grid_that_is_public",),
    ),
    Mutant(
        "window_survives_another_scale",
        "a row would take back noise of another size than was added",
        BANDED,
        "unit == self.unit and",
        "",
        (f"{BANDED_TESTS}::test_a_scale_that_moves_begins_the_recursion_anew",),
    ),
    Mutant(
        "ranks_without_a_turn",
        "other ranks would draw every unit in every row, at the rate of its group",
        "dptune/training/loop.py",
        "entropy, order.turn)",
        "entropy, None)",
        (RANK_TEST,),
    ),
    Mutant(
        "orders_without_a_turn",
        "other ranks would draw every unit in every row, at the rate of its group",
        RUN,
        "release.sample_rate, turn))\n",
        "release.sample_rate, None))\n",
        (RANK_TEST,),
    ),
    Mutant(
        "two_open_runs_share_a_window",
        "rows of one run would take back noise of the other's, which neither ledger holds",
        OPENING,
        "claim_noise(spec, ledger.header.run_id)",
        "pass",
        ("tests/training/test_loop.py::test_two_open_runs_do_not_share_the_noise_of_past_rows",),
    ),
    Mutant(
        "rows_of_another_object",
        "a noise that adds nothing would be certified as Gaussian",
        MECHANISM,
        '"add_row", "correlated", "coefficients", "start")',
        '"add_row", "coefficients", "start")',
        (f"{BANDED_TESTS}::test_who_overrides_the_recursion_names_the_family_again",),
    ),
    Mutant(
        "widths_of_the_drawn_batch",
        "one more unit in a batch could change the width, and so the rounding, of all others",
        "dptune/training/gradients.py",
        "public_widths(tokens.width, plan.expected_batch_size, rows)",
        "public_widths(tokens.width, len(self.batch) * 6.0, rows)",
        ("tests/training/test_widths.py::test_the_shapes_of_a_run_follow_from_its_plan_alone",),
    ),
    Mutant(
        "window_of_fresh_noise",
        "decoded rows would leave noise behind that shrinks with every row: no privacy at all",
        BANDED,
        "normals -= on_device(weights, normals.device) @ self.ring",
        "normals -= on_device(weights, normals.device) @ (self.ring * 1.5)",
        (f"{BANDED_TESTS}::test_the_recursion_is_the_solution_of_the_whole_matrix",),
    ),
    Mutant(
        "noise_not_divided_by_the_first_coefficient",
        "decoded rows would have c_0 times the noise that is charged",
        BANDED,
        "normals /= strategy[0]",
        "pass",
        (f"{BANDED_TESTS}::test_the_law_of_the_noise_is_the_announced_one",),
    ),
    Mutant(
        "recursion_over_a_gap",
        "rows that were lost would count, and a unit's visits lie closer than the ledger says",
        BANDED,
        "whole and last == row - 1 and",
        "whole and",
        (f"{BANDED_TESTS}::test_after_rows_that_were_not_made_here_the_noise_begins_anew",),
    ),
    Mutant(
        "a_failed_row_counts_as_made",
        "a window that was half moved on would be built upon",
        BANDED,
        "last, self.row = self.row, None",
        "last, self.row = self.row, row",
        (f"{BANDED_TESTS}::test_a_row_that_failed_half_way_is_not_built_upon",),
    ),
    Mutant(
        "copies_with_their_noise",
        "two runs of one mechanism would have the same noise, whose difference is an exact sum",
        BANDED,
        "    def __deepcopy__(self, memo: dict[int, Any]) -> _Window:\n        return _Window()\n\n"
        "    def __reduce__(self) -> tuple[type[_Window], tuple[()]]:\n        return _Window, ()\n\n",
        "",
        (f"{BANDED_TESTS}::test_noise_leaves_its_process_neither_by_a_copy_nor_by_a_pickle",),
    ),
    Mutant(
        "a_second_run_goes_on_with_the_noise_of_the_first",
        "rows of two runs would share their past noise",
        BANDED,
        'object.__setattr__(self, "_window", _Window())',
        "pass",
        (f"{BANDED_TESTS}::test_a_start_forgets_the_run_before",),
    ),
    Mutant(
        "charged_at_the_rate_of_the_whole_data",
        "a unit is drawn b times as often in its own rows",
        MECHANISM,
        "rate = self.bands * sample_rate",
        "rate = sample_rate",
        (f"{BANDED_TESTS}::test_rows_are_charged_to_their_group_at_its_own_rate",),
    ),
    Mutant(
        "norm_of_the_strategy_unpriced",
        "a strategy of norm 2 shifts its block by twice the sensitivity",
        MECHANISM,
        "* (1.0 if abs(norm - 1) <= _ROUND_OFF else norm)",
        "",
        (f"{BANDED_TESTS}::test_a_strategy_of_ones_own_is_charged_with_its_norm",),
    ),
    Mutant(
        "norm_in_place_of_the_clippers_sensitivity",
        "four pairs with noise of their own shift the release by twice the norm",
        MECHANISM,
        "return self.clipper.sensitivity(knobs, self.pairs) * (",
        "return max(self.clipper.sensitivity(knobs, self.pairs), norm) if norm != 1 else (",
        (f"{BANDED_TESTS}::test_a_strategy_of_ones_own_is_charged_with_its_norm",),
    ),
    Mutant(
        "noise_stays_after_the_run",
        "who dumps the process' memory later could take the noise out of all releases",
        RUN,
        "self.spec.mechanism.noise.correlated.forget()",
        "pass",
        (f"{KILLS}::test_a_run_that_nobody_kills_is_one_recursion_and_forgets_its_noise",),
    ),
    Mutant(
        "noise_of_another_machines_last_digits",
        "a run could not be resumed elsewhere, and would spend again",
        OPENING,
        "as_charged(spec.mechanism, charged)",
        "spec.mechanism",
        (f"{KILLS}::test_a_run_goes_on_with_the_noise_that_it_was_charged_with",),
    ),
    Mutant(
        "moving_radii_with_correlated_noise",
        "noise cancels only at one scale, and in fixed units its bound is broken",
        BANDED,
        "if type(controller) is not Constant:",
        "if False:",
        (f"{BANDED_TESTS}::test_what_does_not_go_with_it_is_refused_by_name",),
    ),
    Mutant(
        "rows_of_any_group_charged",
        "a unit could be met in two rows in a row",
        LEDGER,
        "if problem := row_problem(self._last, release, self.releases):",
        "if problem := None:",
        (f"{ROW_TESTS}::test_a_row_out_of_turn_is_neither_charged_nor_read",),
    ),
    Mutant(
        "rows_of_any_group_read",
        "a forged ledger would be priced by its parts, whatever rows they stand in",
        LEDGER_FILE,
        "if problem := row_problem(last, content.release, content.step):",
        "if problem := None:",
        (f"{ROW_TESTS}::test_a_row_out_of_turn_is_neither_charged_nor_read",),
    ),
    Mutant(
        "noise_that_changes_between_rows",
        "blocks of which a part has less noise are not those that are priced",
        ROWS,
        'if item.name != "part" and',
        'if item.name not in ("part", "noise_multiplier") and',
        (f"{ROW_TESTS}::test_a_row_out_of_turn_is_neither_charged_nor_read",),
    ),
    Mutant(
        "sensitivity_below_the_norm",
        "a ledger could say 1 of a strategy of norm 2",
        RELEASE,
        "if not self.sensitivity >= column_norm(self.coefficients) * (1 - _CONSISTENT):",
        "if False:",
        (f"{ROW_TESTS}::test_a_row_that_no_proof_covers_is_no_release",),
    ),
    Mutant(
        "parts_added_up_in_calibration",
        "noise would be calibrated as if one unit were in every group",
        PLANNING,
        "for mine in disjoint(planned(mechanism, schedule))",
        "for mine in [planned(mechanism, schedule)]",
        (f"{PLANNING_TESTS}::test_correlated_noise_gets_the_sigma_of_its_group",),
    ),
    Mutant(
        "fewer_visits_planned",
        "the first groups are met once more if the bands do not divide the steps",
        STRATEGY,
        "max(0, -(-(steps - group) // bands))",
        "steps // bands",
        (
            "tests/privacy/test_strategy.py::test_visits_are_the_rows_of_each_group",
            f"{PLANNING_TESTS}::test_the_plan_spreads_over_the_groups",
        ),
    ),
    Mutant(
        "groups_by_a_ranks_own_numbers",
        "a unit would be in one group on its rank and in another in the deal that is priced",
        DATA,
        "return np.where(units < own, first + units, everybody + units - own)",
        "return units",
        (f"{GROUP_TESTS}::test_ranks_together_draw_what_one_process_draws",),
    ),
    Mutant(
        "every_unit_in_every_row",
        "blocks of one unit overlap: two visits in a row shift by 1.85 where 1.41 is priced",
        DATA,
        "chosen = chosen[turn.holds(self._numbers(chosen))]",
        "pass",
        (f"{GROUP_TESTS}::test_a_unit_is_drawn_in_rows_of_its_own_group_alone",),
    ),
    Mutant(
        "groups_shift_by_one",
        "a group would be drawn in another's row, at which nothing was charged to it",
        GROUPS,
        "return cls(row % bands, bands, salt)",
        "return cls((row + row // bands) % bands, bands, salt)",
        (f"{GROUP_TESTS}::test_a_unit_is_drawn_in_rows_of_its_own_group_alone",),
    ),
    Mutant(
        "rows_numbered_by_steps",
        "after a kill rows would be made again, with noise that a lost row already had",
        RUN,
        "row = self.ledger.releases",
        "row = self.step",
        (f"{KILLS}::test_two_hundred_kills_at_random",),
    ),
    Mutant(
        "restarts_not_counted",
        "a reader could not tell why a run ended with more noise",
        OPENING,
        "restarts=sorted({*progress.restarts, *_restarts(spec.mechanism, ledger)}),",
        "restarts=progress.restarts,",
        (f"{KILLS}::test_two_hundred_kills_at_random",),
    ),
    Mutant(
        "an_audit_that_believes_the_strategy",
        "decoded by what the mechanism says of itself, a wrong recursion looks more private than a right one",
        "dptune/audit/rows.py",
        "(_decoder(stage.mechanism, len(inside[0])), _learned(inside[:half], outside[:half]))",
        "(_decoder(stage.mechanism, len(inside[0])),)",
        ("tests/audit/test_rows.py::test_a_planted_bug_is_accused",),
    ),
    Mutant(
        "an_audit_with_its_own_groups",
        "groups that a run deals anew in every row would go unnoticed",
        "dptune/audit/rows.py",
        "drawn = middle and bool(stage.slots[world].draw(sample_rate, stage.entropy, turn))",
        "drawn = row == bands and bool(stage.slots[world].draw(sample_rate, stage.entropy))",
        ("tests/audit/test_rows.py::test_the_attacked_unit_is_drawn_by_the_groups_of_runs",),
    ),
    Mutant(
        "noise_left_in_a_corrected_moment",
        "adam_bc would be Adam with a floor",
        "dptune/training/optimizers.py",
        'root = (state["exp_avg_sq"] / second - noise)',
        'root = (state["exp_avg_sq"] / second)',
        ("tests/training/test_optimizers.py::test_adam_bc_is_the_formula_of_its_paper",),
    ),
    Mutant(
        "noise_told_as_if_rows_were_independent",
        "a bias correction would take out less than half of the noise of correlated rows",
        MECHANISM,
        "spread * self.noise.deviation(knobs.noise_multiplier) * scale",
        "self.noise.deviation(knobs.noise_multiplier) * scale",
        (f"{BANDED_TESTS}::test_the_law_of_the_noise_is_the_announced_one",),
    ),
)
