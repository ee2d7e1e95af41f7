"""The price of a search, and the search itself."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SELECTION, LAW = "dptune/privacy/selection.py", "dptune/privacy/selection_law.py"
SCORE, RUN = "dptune/tuning/search/score.py", "dptune/tuning/search/candidates.py"
CERTIFICATE, SEARCH = "dptune/privacy/certificate.py", "dptune/tuning/search/search.py"
LEDGER_FILE, VERIFYING = "dptune/privacy/ledger_file.py", "dptune/tuning/verifying.py"
RUNS, CERTIFICATES = "tests/tuning/test_search_run.py", "tests/privacy/test_certificate.py"
PROFILE = "dptune/privacy/loss_profile.py"
TESTS = "tests/privacy/test_selection.py"
PIPELINE = "tests/tasks/test_private_search.py"

MUTANTS = (
    Mutant(
        "one_direction_of_a_search",
        "the cheaper direction alone would certify half the true epsilon",
        SELECTION,
        "return max(_epsilon_of(side,",
        "return min(_epsilon_of(side,",
        (f"{TESTS}::test_both_directions_count",),
    ),
    Mutant(
        "trade_off_of_the_wrong_direction",
        "events would be bounded by the divergence that does not bound them",
        SELECTION,
        "slopes, heights = _EXP, profile.add",
        "slopes, heights = _EXP, profile.remove",
        (f"{TESTS}::test_no_enumerated_selection_exceeds_the_bound", f"{TESTS}::test_both_directions_count"),
    ),
    Mutant(
        "cells_by_their_better_corner",
        "a hull through the other corners lies above the true one",
        SELECTION,
        "y = law.slope(np.maximum(1.0 - reached[1:], 0.0))",
        "y = law.slope(np.maximum(1.0 - reached[:-1] ** 2, 0.0))",
        (f"{TESTS}::test_the_best_attack_known_comes_within_one_percent_of_the_bound",),
    ),
    Mutant(
        "unweighted_hull",
        "a search would cost as one candidate does",
        SELECTION,
        "return Shifts(widths, np.log",
        "return Shifts(widths / widths.sum(), np.log",
        (f"{TESTS}::test_widths_add_up_to_the_mean_and_shifts_rise",),
    ),
    Mutant(
        "negative_epsilons_at_zero",
        "shifted below 0, a divergence grows further",
        PROFILE,
        "return np.where(at >= 0, _between(self.remove, np.maximum(at, 0.0)), below)",
        "return _between(self.remove, np.maximum(at, 0.0))",
        (f"{TESTS}::test_a_profile_of_one_gaussian_is_the_closed_form_at_negative_epsilons_too",),
    ),
    Mutant(
        "smallest_kind_for_all",
        "a unit may be in the dearest part",
        PROFILE,
        "np.maximum.reduce([profile.remove",
        "np.minimum.reduce([profile.remove",
        (f"{TESTS}::test_an_average_of_equal_kinds_is_one_and_lies_between_different_ones",),
    ),
    Mutant(
        "cap_that_is_not_priced",
        "the law that is drawn would not be the one that is priced",
        LAW,
        "return found / math.fsum(found)",
        "return found",
        ("tests/privacy/test_selection_law.py::test_a_capped_law_is_a_list_of_probabilities_with_its_mean_and_slope",),
    ),
    Mutant(
        "number_of_candidates_off_by_one",
        "the most likely number would never be drawn",
        LAW,
        'place, side="right")) + 1, self.most)',
        'place, side="right")) + 2, self.most)',
        ("tests/privacy/test_selection_law.py::test_draws_follow_the_law",),
    ),
    Mutant(
        "held_out_units_free",
        "the noisy score of held-out units would cost nothing",
        CERTIFICATE,
        'if self.score.on == "held_out" else []',
        'if self.score.on == "never" else []',
        (f"{CERTIFICATES}::test_the_dearer_side_is_certified",),
    ),
    Mutant(
        "training_scores_free",
        "a score over training units would not compose with their training",
        CERTIFICATE,
        "profile_of(composition_of(kind) + Counter([own] if own else []))",
        "profile_of(composition_of(kind))",
        (f"{CERTIFICATES}::test_a_score_over_training_units_composes_with_their_training",),
    ),
    Mutant(
        "winner_certified_by_its_own_ledger",
        "one run's epsilon would be reported for the best of several",
        LEDGER_FILE,
        "return replace(prices, certified=math.inf, leaks=",
        "return replace(prices, leaks=",
        (f"{CERTIFICATES}::test_a_candidates_ledger_has_no_guarantee_of_its_own",),
    ),
    Mutant(
        "scores_unclipped",
        "one unit could decide the winner",
        SCORE,
        "np.clip(shares, -1.0, 1.0)",
        "np.clip(shares, -9.0, 9.0)",
        (f"{RUNS}::test_one_unit_moves_the_sum_by_at_most_one",),
    ),
    Mutant(
        "scores_without_noise",
        "raw statistics of held-out units would choose",
        SCORE,
        "* terms.noise_multiplier * ONE",
        "* 0.0",
        (f"{RUNS}::test_a_score_has_the_noise_that_is_charged_and_a_public_divisor",),
    ),
    Mutant(
        "divided_by_what_is_there",
        "the number of units that answered is private",
        SCORE,
        "* terms.clip / ONE / terms.units",
        "* terms.clip / ONE / len(losses)",
        (f"{RUNS}::test_a_score_has_the_noise_that_is_charged_and_a_public_divisor",),
    ),
    Mutant(
        "failures_win",
        "a failed candidate has no weights to release",
        SCORE,
        "return best if scores[best] > -math.inf else None",
        "return best",
        (f"{RUNS}::test_the_first_of_equal_scores_wins_and_failures_never_do",),
    ),
    Mutant(
        "scores_drawn_again",
        "each new draw of a score costs its release again",
        RUN,
        "(is_complete(path) or read_ledger(path).releases):\n        return False",
        "(is_complete(path) or read_ledger(path).releases):\n        return True",
        (f"{RUNS}::test_a_score_is_charged_once_and_before_it_is_drawn",),
    ),
    Mutant(
        "another_plan_after_a_kill",
        "a number drawn until it pleases has another law",
        SEARCH,
        "if certificate.commitment != plan.commitment or certificate.id != plan.id:",
        "if certificate.id != plan.id:",
        (f"{RUNS}::test_a_working_folder_that_others_read_or_that_lost_its_plan_is_refused",),
    ),
    Mutant(
        "winner_of_other_weights",
        "a certificate would vouch for any adapter beside it",
        VERIFYING,
        "if found.winner.adapter_sha256 != sha256(path / WEIGHTS):",
        "if not found.winner.adapter_sha256:",
        (f"{RUNS}::test_the_winner_leaves_with_a_certificate_and_nothing_tells_how_many_there_were",),
    ),
    Mutant(
        "planted_secrets_searched",
        "an auditor's secrets would train, and count as units",
        "tasks/search/records.py",
        'TRAIN_SIDE = SPLITS / "train.parquet"',
        'TRAIN_SIDE = Path("data/canaries/train.parquet")',
        (f"{PIPELINE}::test_the_records_are_those_of_the_split_without_canaries",),
    ),
    Mutant(
        "log_of_candidates",
        "a line for each candidate tells how many there are",
        "tasks/search/run.py",
        "root.handlers[:] = [_OwnersFile()]",
        "root.handlers[:] = before",
        (f"{PIPELINE}::test_a_stopped_search_goes_on_and_says_nothing_of_its_candidates",),
    ),
    Mutant(
        "error_that_names_a_candidate",
        "an error's text and place follow the candidates",
        "tasks/search/run.py",
        'raise SearchError(f"the search stopped on the way. Fix: {fix}.") from None',
        'raise SearchError(f"{error}. Fix: {fix}.") from None',
        (f"{PIPELINE}::test_a_stopped_search_goes_on_and_says_nothing_of_its_candidates",),
    ),
)
