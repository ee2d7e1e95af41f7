"""The price of a search: the law of the number of candidates, the bound, and the certificate that states it."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SELECTION = "dptune/privacy/selection.py"
LAW = "dptune/privacy/selection_law.py"
CERTIFICATE = "dptune/privacy/certificate.py"
LEDGER_FILE = "dptune/privacy/ledger_file.py"
CERTIFICATES = "tests/privacy/test_certificate.py"
PROFILE = "dptune/privacy/loss_profile.py"
TESTS = "tests/privacy/test_selection.py"

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
        'if score.on == "held_out" else []',
        'if score.on == "never" else []',
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
        "commitment_without_salt",
        "whoever guesses the number of candidates could test the guess",
        CERTIFICATE,
        "hashlib.sha256(salt + encode(plan).encode())",
        "hashlib.sha256(encode(plan).encode())",
        (f"{CERTIFICATES}::test_a_commitment_follows_its_salt_and_every_draw",),
    ),
)
