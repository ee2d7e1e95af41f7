"""What MLflow is told: figures of records, digests of them and times, where telemetry forbids each."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DATA, MODEL = "tasks/experiment/input_data.py", "tasks/experiment/adapter_model.py"
TRACKING, PAGE = "tasks/tracking.py", "tasks/tracking_page.py"
MODEL_TESTS, PAGE_TESTS = "tests/tasks/test_logged_model.py", "tests/tasks/test_tracking_page.py"

MUTANTS = (
    Mutant(
        "a_private_metric_is_allowed",
        "a figure of held-out records would reach MLflow under private telemetry",
        "tasks/metrics.py",
        'if telemetry == "research" or name not in private}',
        "if telemetry or name not in private}",
        ("tests/tasks/test_metrics.py::test_no_private_metric_is_sent_or_kept_under_private_telemetry",),
    ),
    Mutant(
        "private_digest_of_rows",
        "under private telemetry MLflow would hold a number that follows from the records",
        DATA,
        'return cell.inputs["data"][:_DIGITS] if timed(cell.telemetry) else _of_description(about)',
        'return cell.inputs["data"][:_DIGITS]',
        (f"{MODEL_TESTS}::test_under_private_telemetry_nothing_follows_from_the_records",),
    ),
    Mutant(
        "plain_digest_of_held_out_rows",
        "whoever reads MLflow could test a guess of all held-out records",
        DATA,
        'InputData(held_out, private, "evaluation"',
        'InputData(held_out, sha256(EVAL)[:_DIGITS], "evaluation"',
        (f"{MODEL_TESTS}::test_no_plain_hash_of_private_records_is_in_mlflow",),
    ),
    Mutant(
        "private_dvc_hash",
        "under private telemetry DVC's hash of the training file would be a tag",
        TRACKING,
        'if telemetry == "research" else {}\n\n\ndef dvc_hash',
        "if telemetry else {}\n\n\ndef dvc_hash",
        ("tests/tasks/test_tracking.py::test_the_child_carries_dvcs_hash_of_the_training_data",),
    ),
    Mutant(
        "private_model_is_stamped",
        "MLflow would hold the time at which a private run ended, which follows the secret sizes of its batches",
        TRACKING,
        "        if self._timed:\n            log_model(",
        "        if self._parent:\n            log_model(",
        (f"{MODEL_TESTS}::test_a_research_run_has_a_logged_model_and_a_private_one_no_stamp",),
    ),
    Mutant(
        "private_model_tells_the_time",
        "the same, in the model's own description",
        MODEL,
        '    about["utc_time_created"] = _NO_TIME\n',
        "",
        (f"{MODEL_TESTS}::test_a_research_run_has_a_logged_model_and_a_private_one_no_stamp",),
    ),
    Mutant(
        "answer_of_other_cells_stays",
        "a page of private telemetry would open with a perplexity on held-out records",
        PAGE,
        'before = "" if others else',
        'before = "" if not tags else',
        (f"{PAGE_TESTS}::test_the_description_opens_with_the_answer_until_other_cells_are_there",),
    ),
    Mutant(
        "epsilons_rounded_down_in_mlflow",
        "MLflow's table would promise more than the ledger",
        "dptune/digits.py",
        "ROUND_CEILING))",
        "ROUND_FLOOR))",
        ("tests/tasks/test_tracking.py::test_epsilons_are_tags_that_never_promise_more_than_the_ledger",),
    ),
)
