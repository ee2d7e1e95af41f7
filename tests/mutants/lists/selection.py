"""Searches of the pipeline: their records, what they print, and how well a ranking carries over."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PIPELINE = "tests/tasks/test_private_search.py"
RANKED = "tests/tasks/test_search_ranking.py"
PIPED = "tests/tasks/test_search_secrets.py"
WORKERS = "tests/flows/test_runners.py"

MUTANTS = (
    Mutant(
        "another_search_after_a_lost_worker",
        "an edited params.yaml would be searched and paid for, and the first search be left unfinished",
        "tasks/search/run.py",
        "if expect and digest_of(settings) != expect:",
        "if not expect:",
        (f"{WORKERS}::test_a_worker_that_begins_late_does_not_begin_another_search",),
    ),
    Mutant(
        "copy_of_the_folder_on_a_worker",
        "charges would go to a register that the flow does not see",
        "flows/shared_folder.py",
        "self.path / DATA / self.mark",
        "self.path / DATA",
        (f"{WORKERS}::test_a_worker_that_sees_a_copy_of_the_folder_says_so",),
    ),
    Mutant(
        "two_workers_on_one_search",
        "the process of a killed worker and the next one would work on it at once",
        "tasks/search/run.py",
        "held.enter_context(locked(lock, wait=True))",
        "pass",
        (f"{WORKERS}::test_a_worker_waits_for_one_that_ends_and_says_so",),
    ),
    Mutant(
        "planted_secrets_searched",
        "an auditor's secrets would train, and count as units",
        "tasks/split_records.py",
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
    Mutant(
        "candidates_that_print",
        "what a library prints for each candidate tells how many there are",
        "tasks/search/run.py",
        "                os.dup2(descriptor, number)\n",
        "",
        (f"{PIPED}::test_whatever_a_candidates_code_prints_goes_to_the_owners_file",),
    ),
    Mutant(
        "composed_without_scores",
        "the naive price would leave out what scores cost the held-out units",
        "tasks/search/prices.py",
        "max(map(price, sides))",
        "price(run)",
        (f"{PIPED}::test_the_price_of_choosing_counts_the_dearer_side",),
    ),
    Mutant(
        "diverged_run_of_a_rehearsal_resumed",
        "a page that says that nothing was released would be followed by a winner",
        "tasks/search/run.py",
        'get("released", True):',
        'get("released", True) is None:',
        (f"{PIPELINE}::test_a_rehearsal_whose_private_run_diverges_has_ended",),
    ),
    Mutant(
        "price_of_a_diverged_run_forgotten",
        "a run that diverged would be told to be free",
        "tasks/search/run.py",
        "about, cost.certified, {",
        "about, 0.0, {",
        (f"{PIPELINE}::test_a_rehearsal_whose_private_run_diverges_has_ended",),
    ),
    Mutant(
        "ranking_under_private_telemetry",
        "perplexities of held-out private records would be told, and no guarantee covers them",
        "tasks/search/asked.py",
        'if settings.search.check_ranking and settings.experiment.telemetry == "private":',
        "if settings.search.check_ranking and not settings.search.rehearses:",
        (f"{RANKED}::test_private_telemetry_refuses_it_by_name_and_it_is_off_by_default",),
    ),
    Mutant(
        "runs_of_a_ranking_forgotten",
        "runs on the private records would be in no register",
        "tasks/search/ranking.py",
        "run(prepared, out, register).perplexity",
        'run(prepared, out, Register(out / "spent.jsonl")).perplexity',
        (f"{RANKED}::test_every_setting_is_paid_for_once_and_the_winner_not_again",),
    ),
    Mutant(
        "winner_of_a_ranking_run_twice",
        "the winner would be trained, and paid for, a second time",
        "tasks/search/ranking.py",
        "if prepared.settings == found.settings:",
        "if prepared.settings is found.settings:",
        (f"{RANKED}::test_every_setting_is_paid_for_once_and_the_winner_not_again",),
    ),
    Mutant(
        "setting_drawn_twice_is_paid_twice",
        "equal settings would be paid for once for each draw",
        "tasks/search/ranking.py",
        "groups.setdefault(json.dumps(one[0], sort_keys=True), []).append(one)",
        "groups[str(len(groups))] = [one]",
        (f"{RANKED}::test_a_setting_that_was_drawn_twice_is_run_once",),
    ),
)
