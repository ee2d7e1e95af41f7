"""What leaves a search: the winner, its certificate and its card."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

VERIFYING = "dptune/tuning/verifying.py"
RUNS = "tests/tuning/test_search_run.py"
CERTIFICATES = "tests/privacy/test_certificate.py"
VERIFIED = "tests/tuning/test_search_verified.py"

MUTANTS = (
    Mutant(
        "winner_of_other_weights",
        "a certificate would vouch for any adapter beside it",
        VERIFYING,
        "if found.winner.adapter_sha256 != sha256(path / WEIGHTS):",
        "if not found.winner.adapter_sha256:",
        (f"{RUNS}::test_the_winner_leaves_with_a_certificate_and_nothing_tells_how_many_there_were",),
    ),
    Mutant(
        "ledger_of_a_search_that_leaks",
        "a winner, or a score, whose noise has a fixed seed would be certified",
        VERIFYING,
        "    if header.leaks:\n",
        "    if header.leaks is None:\n",
        (f"{VERIFIED}::test_a_ledger_of_a_search_says_nothing_that_the_certificate_does_not_price",),
    ),
    Mutant(
        "winner_that_was_not_its_ledgers_end",
        "the releases that a winner's ledger lost, or inherited, would be free",
        VERIFYING,
        '    if problem := _beyond(contents):\n        raise CardError(f"{file}: does not price',
        '    if (problem := _beyond(contents)) is None:\n        raise CardError(f"{file}: does not price',
        (f"{VERIFIED}::test_a_ledger_of_a_search_says_nothing_that_the_certificate_does_not_price",),
    ),
    Mutant(
        "certificate_of_another_delta",
        "a search would be priced at a delta that its winner's ledger does not have",
        VERIFYING,
        "    same = (found.id, found.delta, ",
        "    same = (found.id, header.delta, ",
        (f"{VERIFIED}::test_a_certificate_of_another_search_is_refused_though_the_score_says_the_same",),
    ),
    Mutant(
        "certificate_with_any_leak",
        "a certificate that names a leak would be taken for one that keeps its budget",
        VERIFYING,
        "if found.all_leaks == (DEALT_BY_RANK,) else found.certified",
        "if found.all_leaks else found.certified",
        (f"{CERTIFICATES}::test_a_certificate_that_contradicts_itself_does_not_verify",),
    ),
    Mutant(
        "plug_ins_are_not_on_the_card",
        "a guarantee that rests on somebody's code would not say so",
        "dptune/tuning/card.py",
        '    not_covered += [f"Mistakes in {plugin}, which',
        '    _ = [f"Mistakes in {plugin}, which',
        (f"{VERIFIED}::test_a_card_names_the_plug_ins_of_its_run_or_of_all_candidates",),
    ),
    Mutant(
        "configurations_are_drawn_once",
        "candidates would not be independent, which the price needs",
        "dptune/tuning/search/plan.py",
        "            drawn.append(Drawn(",
        "            while any(options == one.options for one in drawn):\n"
        "                number, options = search.space.draw(entropy)\n"
        "            drawn.append(Drawn(",
        ("tests/tuning/test_search_register.py::test_a_configuration_may_be_drawn_again",),
    ),
    Mutant(
        "sum_is_rounded_once",
        "the rounding of floats would let one unit move a score by more than its share",
        "dptune/tuning/search/score.py",
        "return int(np.rint(shares * ONE).astype(np.int64).sum())",
        "return int(np.rint((shares * ONE).sum()))",
        ("tests/tuning/test_search_scores.py::test_a_units_share_of_the_sum_is_its_own_however_many_others_there_are",),
    ),
    Mutant(
        "full_memory_fails_a_candidate",
        "candidates would fail for lack of the machine's memory, in company more often than alone",
        "dptune/errors.py",
        '_FULL, _FULL_CPU = ("OutOfMemoryError", "MemoryError"),',
        '_FULL, _FULL_CPU = ("OutOfMemoryError",),',
        (
            "tests/tuning/test_search_fates.py::"
            "test_a_failure_means_the_same_for_each_candidate_of_each_number[full machine in scoring]",
        ),
    ),
    Mutant(
        "winner_beyond_its_kind",
        "a winner of a dearer kind would be certified as one of a cheaper",
        VERIFYING,
        "if exceeds(contents.composition, found.kinds[number][1]):",
        "if number < 0:",
        (f"{VERIFIED}::test_a_winner_of_a_cheaper_kind_is_refused",),
    ),
    Mutant(
        "certificate_of_another_search",
        "a certificate of other records, or of fewer units, would vouch for the winner beside it",
        VERIFYING,
        "    if same != own or not",
        "    if not",
        (f"{VERIFIED}::test_a_first_line_that_contradicts_is_refused",),
    ),
    Mutant(
        "score_of_another_noise",
        "a certificate would price other noise than the score's ledger charges",
        VERIFYING,
        "    _check_score(path, found)\n",
        "",
        (f"{VERIFIED}::test_the_ledger_of_the_score_is_there_whole_and_of_this_search",),
    ),
    Mutant(
        "card_of_one_candidate",
        "the card would state one run's epsilon for the best of several",
        "dptune/tuning/card.py",
        "contents.epsilons.noise_only if certificate is None else certificate.epsilon_by(certificate.bound)",
        "contents.epsilons.noise_only",
        (f"{VERIFIED}::test_the_epsilons_of_a_search_are_the_same_everywhere",),
    ),
    Mutant(
        "plugins_of_a_winner_unnamed",
        "code that the certificate does not name would have bounded or noised the winner",
        VERIFYING,
        " or not {*header.plugins} <= {*found.plugins}:",
        ":",
        (f"{VERIFIED}::test_a_winner_made_by_code_that_the_certificate_does_not_name_is_refused",),
    ),
    Mutant(
        "certificate_in_place_of_a_ledger",
        "any weights beside a winner's certificate would verify",
        "dptune/cli/ledgers.py",
        "if ledger.is_dir() and found.winner is not None:",
        "if ledger is None:",
        (f"{CERTIFICATES}::test_a_folder_that_lost_its_winners_ledger_does_not_verify",),
    ),
)
