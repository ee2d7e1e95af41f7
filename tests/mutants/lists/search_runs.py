"""The search itself: its plan and kinds, what candidates run and log, their scores, and a rehearsal."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SCORE = "dptune/tuning/search/score.py"
RUN = "dptune/tuning/search/candidates.py"
SEARCH = "dptune/tuning/search/search.py"
RUNS = "tests/tuning/test_search_run.py"
SECRECY = "tests/tuning/test_search_secrecy.py"
SCORES = "tests/tuning/test_search_scores.py"
KINDS = "tests/tuning/test_search_kinds.py"
OUTCOMES = "tests/tuning/test_search_outcomes.py"
SPACE_KINDS = "dptune/tuning/search/kinds.py"
REGISTERED = "tests/tuning/test_search_register.py"
FATES = "tests/tuning/test_search_fates.py"
SAME = f"{FATES}::test_a_failure_means_the_same_for_each_candidate_of_each_number"
ONCE = f"{FATES}::test_a_candidate_that_diverged_once_has_failed_however_many_there_are_and_whenever_it_is_killed"
TOGETHER = "tests/training/test_together.py"
TOLD = f"{TOGETHER}::test_a_runs_own_failure_is_told_before_the_others_go_on_and_a_passs_never"
TRAINING = "dptune/training"

MUTANTS = (
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
        "another_plan_after_a_kill",
        "a number drawn until it pleases has another law",
        SEARCH,
        "if certificate.commitment != plan.commitment or certificate.id != plan.id:",
        "if certificate.id != plan.id:",
        (f"{RUNS}::test_a_working_folder_that_others_read_or_that_lost_its_plan_is_refused",),
    ),
    Mutant(
        "plan_for_other_records",
        "a plan would go on with records and settings that its certificate does not price",
        SEARCH,
        "        _check_plan(prepared, asked, plan, working)\n",
        "",
        (f"{SECRECY}::test_a_plan_is_used_for_no_other_records_or_settings_though_the_result_folder_is_gone",),
    ),
    Mutant(
        "candidates_beyond_their_kind",
        "a candidate could release more than its kind is priced for",
        RUN,
        "    if exceeds(planned(mechanism.mechanism, schedule.priced), kind):",
        "    if not shared.kinds:",
        (f"{SECRECY}::test_no_candidate_releases_more_than_its_kind_whatever_the_plan_says",),
    ),
    Mutant(
        "candidates_that_others_count",
        "the number of links of the secret folder would tell every user how many candidates there are",
        RUN,
        "RunFolder(self.folder / CANDIDATES / candidate.name)",
        "RunFolder(self.folder / candidate.name)",
        (f"{SECRECY}::test_what_others_can_stat_of_the_secret_folder_does_not_follow_the_number",),
    ),
    Mutant(
        "noise_of_the_first_kind",
        "all candidates would have the noise of one kind",
        RUN,
        "noise = shared.plan.kinds[candidate.kind][1]",
        "noise = shared.plan.kinds[0][1]",
        (f"{SECRECY}::test_candidates_have_the_noise_of_their_own_kind_and_their_own_settings",),
    ),
    Mutant(
        "search_that_talks",
        "a line for each candidate tells how many there are",
        SEARCH,
        "    log.setLevel(logging.CRITICAL + 1)\n",
        "",
        (f"{SECRECY}::test_nothing_is_logged_while_candidates_run",),
    ),
    Mutant(
        "winners_figures_of_held_out_records",
        "raw statistics of held-out records would leave with the winner",
        SEARCH,
        'replace(own, settings=replace(own.settings, telemetry="private"))',
        "own",
        (f"{SECRECY}::test_no_figure_of_held_out_records_is_told_under_research_telemetry_either",),
    ),
    Mutant(
        "score_drawn_before_it_is_charged",
        "a score of a killed search would be drawn twice and charged once",
        RUN,
        """    charge_score(ledger, score_header(shared), shared.terms)
    return noisy_score(losses, shared.before, shared.terms, journal.noise[name])
""",
        """    found = noisy_score(losses, shared.before, shared.terms, journal.noise[name])
    charge_score(ledger, score_header(shared), shared.terms)
    return found
""",
        (f"{SCORES}::test_a_score_is_charged_before_it_is_drawn",),
    ),
    Mutant(
        "score_with_fresh_noise_when_made_again",
        "a score of a killed search would be drawn twice and charged once",
        RUN,
        "    if name not in journal.noise:\n        if is_charged(ledger):\n",
        "    journal.noise.pop(name, None)\n    if True:\n        if False:\n",
        (f"{SCORES}::test_a_score_whose_process_died_is_the_same_when_it_is_made_again",),
    ),
    Mutant(
        "batch_that_one_record_spoils",
        "one unit would move the sum by the shares of its whole batch",
        SCORE,
        """        if len(chosen) == 1:
            return np.array([np.nan])""",
        """        return np.full(len(chosen), np.nan)""",
        (f"{SCORES}::test_a_record_that_raises_moves_a_score_by_its_own_unit_alone",),
    ),
    Mutant(
        "plugins_of_the_first_kind",
        "a certificate would not name the code that another kind's guarantee rests on",
        SEARCH,
        "for kind in kinds for plugin in kind.plugins",
        "for kind in kinds[:1] for plugin in kind.plugins",
        (f"{KINDS}::test_a_plug_in_of_any_kind_is_named_by_the_certificate",),
    ),
    Mutant(
        "resumed_search_asks_nobody",
        "a search killed before its line in the register would add to what others paid, unasked",
        SEARCH,
        "certificate, again=asked.again)\n        write_json(known, cell)",
        "certificate, again=True)\n        write_json(known, cell)",
        (f"{REGISTERED}::test_others_that_paid_while_a_search_was_killed_are_asked_about",),
    ),
    Mutant(
        "refused_plan_stays",
        "a refused search would go on by its plan",
        SEARCH,
        "        shutil.rmtree(working)  # nothing ran yet\n",
        "",
        (f"{REGISTERED}::test_a_refused_search_leaves_no_plan",),
    ),
    Mutant(
        "commitment_to_names_alone",
        "candidates could be exchanged after their results are known",
        "dptune/tuning/search/plan.py",
        "[asdict(one) for one in self.candidates]",
        "[one.name for one in self.candidates]",
        (f"{REGISTERED}::test_the_commitment_fixes_the_settings_of_every_candidate",),
    ),
    Mutant(
        "worst_public_score_wins",
        "the worst candidate would be released as the best",
        RUN,
        "return -loss if",
        "return loss if",
        (f"{REGISTERED}::test_the_lower_public_loss_is_the_better_score",),
    ),
    Mutant(
        "rehearsal_on_private_records",
        "settings would be chosen by the private records, at no price",
        "dptune/tuning/search/rehearsal.py",
        "replace(source, data=source.public, public=None",
        "replace(source, data=source.data, public=None",
        ("tests/tuning/test_search_rehearsal.py::test_a_rehearsal_reads_no_private_record",),
    ),
    Mutant(
        "rehearsal_drawn_again_after_its_run",
        "settings of a run would be lost, and no change of settings could bring them back",
        "dptune/tuning/search/rehearsal.py",
        "        if RunFolder(out).ledger.exists():\n",
        "        if RunFolder(out).checkpoint.is_dir():\n",
        (
            "tests/tuning/test_search_rehearsal.py::test_the_best_on_public_records_is_trained_once_within_the_whole_budget",
        ),
    ),
    Mutant(
        "candidates_of_one_run_id",
        "a loser's ledger would pass for the winner's",
        RUN,
        "run_id=candidate.name)",
        "run_id=shared.plan.id)",
        (f"{OUTCOMES}::test_no_two_candidates_have_one_run_id",),
    ),
    Mutant(
        "candidate_that_ends_before_its_outcome",
        "one that is killed in between has ended without a score, and its search could not go on",
        RUN,
        """        shared.journal.end(candidate.name, score, "", _files(folder))
        ledger.finish()
""",
        """        ledger.finish()
        shared.journal.end(candidate.name, score, "", _files(folder))
""",
        (f"{OUTCOMES}::test_a_candidates_outcome_is_on_disk_before_its_ledger_ends",),
    ),
    Mutant(
        "own_failure_is_told_to_nobody",
        "a candidate that diverged in company would be resumed with fresh noise, and might win",
        f"{TRAINING}/run.py",
        "            self.spec.on_failure(error)\n",
        "            pass\n",
        (f"{SAME}[crash in a step]", TOLD),
    ),
    Mutant(
        "own_failure_counts_after_the_pass",
        "killed before its companions end, a candidate that diverged would have another attempt",
        "dptune/training/together.py",
        "            runs[number].fail(error)\n",
        "            runs[number].ledger.close()\n",
        (ONCE,),
    ),
    Mutant(
        "failure_of_a_pass_is_everybodys_own",
        "candidates in company would fail by an error of another one's",
        f"{TRAINING}/run.py",
        "        if not self.computing:\n",
        "        if True:\n",
        (f"{SAME}[pass once]", TOLD),
    ),
    Mutant(
        "crash_in_a_step_is_its_passs",
        "a candidate would have two attempts where its failure is its own",
        f"{TRAINING}/run.py",
        """            self.computing = False
            yield batch
""",
        """            yield batch
""",
        (f"{TOGETHER}::test_a_runs_own_crash_over_its_gradients_is_told",),
    ),
    Mutant(
        "last_gradients_are_never_made",
        "what a step raises after its gradients would pass for the pass's error",
        f"{TRAINING}/run.py",
        """            self.computing = True
        self.computing = False
""",
        """            self.computing = True
""",
        (f"{TOGETHER}::test_a_runs_own_crash_over_its_gradients_is_told",),
    ),
    Mutant(
        "lone_candidate_has_one_try",
        "a pass that fails would cost a candidate its chance where it has no companions",
        RUN,
        "    again: set[tuple[str, bool]] = set()  #",
        "    again = {(one.name, False) for one in waiting if not waiting[1:]}  #",
        (f"{SAME}[pass once]",),
    ),
    Mutant(
        "failure_before_the_first_step_has_two_tries",
        "a candidate whose budget is spent would be tried until it fits",
        RUN,
        "    if attempt in again or isinstance(error, _OWN):\n",
        "    if attempt in again:\n",
        (f"{SAME}[plan beyond its budget]",),
    ),
    Mutant(
        "candidate_fails_by_the_machine",
        "a candidate would be lost for what another process holds of the GPU's memory",
        RUN,
        "    elif not (isinstance(error, OSError | DptuneError) or is_of_device(error)):\n",
        "    elif not isinstance(error, OSError | DptuneError):\n",
        (f"{SAME}[full in a step]", f"{SAME}[lost device]"),
    ),
    Mutant(
        "candidate_fails_by_the_disk",
        "a candidate would be lost for a disk that is full",
        RUN,
        "isinstance(error, OSError | DptuneError) or is_of_device(error)",
        "isinstance(error, DptuneError) or is_of_device(error)",
        (f"{SAME}[full disk in a step]",),
    ),
    Mutant(
        "disk_that_is_tried_again",
        "a score that was charged would be lost in company and kept alone",
        RUN,
        "    if isinstance(error, _DISK):\n        raise error\n",
        "",
        (f"{SAME}[full disk for weights]",),
    ),
    Mutant(
        "pass_that_is_tried_on_records",
        "candidates in company would pay for a step that a full GPU does not make",
        RUN,
        "            rehearse_pass(shared.weights, runs)  #",
        "            pass  #",
        (f"{FATES}::test_a_pass_that_does_not_fit_costs_those_in_company_no_step",),
    ),
    Mutant(
        "full_gpu_that_scores",
        "all units would count as the worst for what another process holds of the GPU's memory",
        SCORE,
        "isinstance(error, OSError) or is_of_device(error)",
        "isinstance(error, OSError)",
        (f"{SCORES}::test_what_the_machine_or_the_user_stops_is_no_records_failure",),
    ),
    Mutant(
        "stop_that_a_failure_swallows",
        "a search that is stopped would go on with its next candidate, if it has no companions",
        f"{TRAINING}/loop.py",
        "                if not asked():  #",
        "                if True:  #",
        ("tests/training/test_stopping.py::test_a_run_that_diverged_when_it_was_stopped_says_both",),
    ),
    Mutant(
        "clipper_that_fails_ends_all",
        "companions would be resumed, at the price of their steps, for an error of another one's clipper",
        "dptune/training/together.py",
        "                    attempt(number, shared.complete, number, steps[number])\n",
        """                    run = runs[number]
                    clipped = run.spec.mechanism.clipper.gradients(_RunGradients(shared, number))
                    attempt(number, run.complete, steps[number], clipped)
""",
        (f"{TOGETHER}::test_a_clipper_that_fails_ends_its_own_run_alone",),
    ),
    Mutant(
        "diverged_cell_is_resumed",
        "whether a cell has another attempt would follow from whether others of its process crashed",
        "tasks/experiment/finetune.py",
        "        keep_divergence(cell.directory, error)\n",
        "        pass\n",
        ("tests/tasks/test_groups.py::test_a_cell_that_diverged_is_known_before_the_others_of_its_pass_end",),
    ),
    Mutant(
        "cell_of_a_failed_pass_is_not_tried_alone",
        "a cell would fail by what others of its pass compute",
        "tasks/experiment/finetune.py",
        "and is_unforeseen(end) and not one.own and ranks.world == 1",
        "and is_unforeseen(end) and one.own and ranks.world == 1",
        ("tests/tasks/test_groups.py::test_a_pass_that_fails_once_ends_no_cell_and_one_that_fails_again_does",),
    ),
    Mutant(
        "starts_of_candidates_unchecked",
        "a point that a mechanism refuses would be a candidate that fails, after the budget is spent",
        SPACE_KINDS,
        "    _check_starts(priced_kinds, search, settings, base, units)\n",
        "",
        (f"{KINDS}::test_what_a_mechanism_refuses_at_its_final_noise_is_refused_before_anything_is_drawn",),
    ),
    Mutant(
        "first_point_alone_is_started",
        "later points of a space would be refused after its plan is drawn, or by nobody",
        SPACE_KINDS,
        """            if (key := _start_of(own, schedule)) not in started:
                started.add(key)
                probe""",
        """            if not started:
                started.add(_start_of(own, schedule))
                probe""",
        (f"{KINDS}::test_what_a_mechanism_refuses_at_its_start_is_refused_before_any_noise_is_priced",),
    ),
    Mutant(
        "every_point_is_started",
        "a large space would be checked for as long as it takes to start each of its points",
        SPACE_KINDS,
        "        settings.mechanism,\n        schedule.options,",
        "        settings.mechanism,\n        settings.optimizer,\n        schedule.options,",
        (f"{KINDS}::test_settings_that_start_alike_are_started_once",),
    ),
    Mutant(
        "ranges_of_the_first_table",
        "the ranges of other tables would be checked by nobody",
        "dptune/tuning/search/space.py",
        "(kind, kind | table.upper) if table.upper else (kind,)",
        "(kind, kind | self.tables[0].upper) if table.upper else (kind,)",
        ("tests/tuning/test_search_space.py::test_each_kind_is_checked_at_both_ends_of_its_own_ranges",),
    ),
)
