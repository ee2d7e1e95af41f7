"""Tuning on records of one's own: what is protected, what is told, and what a card may say."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PREPARE, RUN, DEFAULTS = "dptune/tuning/prepare.py", "dptune/tuning/run.py", "dptune/tuning/defaults.py"
FINISHED, SAMPLE_TESTS = "dptune/tuning/finished.py", "tests/tuning/test_sample.py"
TUNE_TESTS, DEFAULTS_TESTS = "tests/tuning/test_tune.py", "tests/tuning/test_defaults.py"
FINGERPRINTS = "tests/tuning/test_fingerprints.py"

MUTANTS = (
    Mutant(
        "records_in_place_of_customers",
        "a customer with many records would be protected for one of them, and the ledger would say otherwise",
        PREPARE,
        "np.array([record.unit for record in records], dtype=np.int64)",
        "np.arange(len(records))",
        (f"{TUNE_TESTS}::test_removing_one_customer_changes_exactly_that_unit",),
    ),
    Mutant(
        "held_out_under_private_telemetry",
        "a statistic of private records would be told, which private telemetry promises to keep",
        PREPARE,
        'settings.eval_share if settings.telemetry == "research" or scored else 0.0',
        "settings.eval_share",
        (f"{TUNE_TESTS}::test_private_telemetry_tells_no_statistic_of_private_records",),
    ),
    Mutant(
        "any_delta",
        "a run could be certified at a delta that publishing one customer in full satisfies",
        "dptune/privacy/calibration.py",
        "    if delta * units >= 1:",
        "    if delta >= 1:",
        (f"{DEFAULTS_TESTS}::test_a_delta_that_publishing_one_unit_would_satisfy_is_refused",),
    ),
    Mutant(
        "other_records_go_on",
        "a run could be continued on other records, whose privacy its ledger does not count",
        RUN,
        '"records": prepared.digest(salt),',
        '"records": salt,',
        (f"{TUNE_TESTS}::test_the_same_command_again_makes_nothing_new",),
    ),
    Mutant(
        "weights_of_another_run",
        "a card with a small epsilon could be put beside weights that cost more",
        "dptune/tuning/verifying.py",
        "name: sha256_once(path / name)",
        "name: sha256_once(path / (CONFIG if name == WEIGHTS else name))",
        (f"{TUNE_TESTS}::test_a_card_a_ledger_or_weights_that_were_changed_are_refused",),
    ),
    Mutant(
        "scored_with_swapped_labels",
        "a classifier would be scored by labels in another order than it learned, without a word",
        "dptune/tuning/verifying.py",
        "if stated[name] != found.get(name):",
        "if name == WEIGHTS and stated[name] != found.get(name):",
        ("tests/tuning/test_score.py::test_a_folder_whose_files_are_not_those_of_its_card_is_refused",),
    ),
    Mutant(
        "tokenizer_of_another_run",
        "a tokenizer that turns words into others could be put beside a card that vouches for the folder",
        "dptune/tuning/verifying.py",
        "name: sha256_once(path / name)",
        "name: sha256_once(path / (CONFIG if name in _TOKENIZER else name))",
        (f"{TUNE_TESTS}::test_a_card_a_ledger_or_weights_that_were_changed_are_refused",),
    ),
    Mutant(
        "texts_of_any_adapter",
        "texts would be handed on with the small epsilon of a card that the ledger contradicts",
        FINISHED,
        "= check_deliverable(path), ",
        "= __import__('dptune.privacy.ledger_file').privacy.ledger_file.read_ledger(RunFolder(path).ledger), ",
        (f"{SAMPLE_TESTS}::test_an_adapter_that_does_not_verify_is_refused",),
    ),
    Mutant(
        "texts_of_a_run_without_an_end",
        "texts could be of weights that followed releases which the ledger lost",
        "dptune/tuning/verifying.py",
        "if not contents.complete:",
        "if contents.releases < 0:",
        (f"{SAMPLE_TESTS}::test_a_run_without_an_end_and_chats_are_refused",),
    ),
    Mutant(
        "texts_without_a_guarantee",
        "texts of an adapter that certifies nothing would be written without a word",
        FINISHED,
        "        if not has_guarantee(self.epsilon):",
        "        if False:",
        (f"{SAMPLE_TESTS}::test_without_a_guarantee_it_takes_a_word_and_the_card_says_so",),
    ),
    Mutant(
        "epsilons_rounded_down",
        "a card would promise less epsilon than the ledger proves",
        "dptune/tuning/card.py",
        "rounding=ROUND_CEILING",
        "rounding='ROUND_FLOOR'",
        ("tests/tuning/test_card.py::test_a_card_promises_no_less_than_the_ledger",),
    ),
    Mutant(
        "chats_that_nobody_knows_again",
        "the same chats written by another program would escape the register",
        "dptune/corpus/reading/record.py",
        "{name: _in_one_order(value) for name, value in vars(record.content).items() if value or type(value) is str}",
        "vars(record.content)",
        (f"{FINGERPRINTS}::test_the_order_of_names_in_a_chat_does_not_matter",),
    ),
    Mutant(
        "another_split_escapes",
        "the same records under another split of the pipeline would escape the register",
        "dptune/corpus/reading/read.py",
        "(*self.train, *self.eval, *self.test)",
        "(*self.train, *self.eval)",
        (f"{FINGERPRINTS}::test_all_sides_of_a_split_count_and_how_they_were_dealt_does_not",),
    ),
    Mutant(
        "removed_ledger_forgotten",
        "a run that starts over after its ledger was removed would count once",
        RUN,
        "if changed or folder.lost_its_ledger else",
        "if changed else",
        ("tests/tuning/test_spent_runs.py::test_a_run_whose_ledger_was_removed_starts_again_as_another_entry",),
    ),
    Mutant(
        "folder_checked_before_the_lock_alone",
        "a run would put its ledger and weights into the folder of a search that began in between",
        RUN,
        "        check_folder(out)  # again: a search may have begun in between\n",
        "",
        ("tests/tuning/test_search_folders.py::test_what_another_process_began_in_between_is_seen_under_the_lock",),
    ),
)
