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
        "prices.noise_only if certificate is None else certificate.epsilon_by(certificate.bound)",
        "prices.noise_only",
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
        "if alone != ledger and found.winner is not None:",
        "if alone is None:",
        (f"{CERTIFICATES}::test_a_folder_that_lost_its_winners_ledger_does_not_verify",),
    ),
)
