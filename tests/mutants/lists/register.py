"""The register of what was published: what counts in it, of which records, and with which price."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

REGISTER, REGISTERS = "dptune/privacy/spent.py", "tests/privacy/test_register.py"
GROWS = f"{REGISTERS}::test_the_same_entry_with_more_releases_replaces_the_smaller_and_never_the_other_way"
HEADERS = f"{REGISTERS}::test_of_two_headers_of_one_entry_the_dearer_counts_in_any_order"
SPLIT, CELLS = "tasks/split_records.py", "tests/tasks/test_cells_register.py"
BOOKING, BOOKINGS = "dptune/prediction/booking.py", "tests/prediction/test_booking.py"
DEPLOYMENT, COMMAND = "dptune/prediction/deployment.py", "dptune/cli/ensembles.py"
SERVED = f"{BOOKINGS}::test_serve_counts_in_the_register_that_is_named_and_warns_the_owner"
NUMBERS = "tests/tasks/test_plain_numbers.py"

MUTANTS = (
    Mutant(
        "first_entry_stays",
        "a run that went on after it was booked would count with what it had released by then",
        REGISTER,
        "    if not before:\n",
        "    if before or not before:\n",
        (GROWS,),
    ),
    Mutant(
        "last_entry_wins",
        "a run that is booked again with less would take back what was counted",
        REGISTER,
        "both = before | now",
        "both = now",
        (GROWS,),
    ),
    Mutant(
        "grown_entry_keeps_its_price",
        "a warning would tell the price of the smaller entry",
        REGISTER,
        'if "certified" in grown:',
        'if "certified" not in grown:',
        (GROWS,),
    ),
    Mutant(
        "first_header_stays",
        "a run that is booked again with a leak would keep its bound",
        REGISTER,
        'if encode(content["header"]) != encode(known["header"]):',
        "if not both:",
        (HEADERS,),
    ),
    Mutant(
        "last_header_wins",
        "a run that is booked again without its leak would get a bound",
        REGISTER,
        'grown = {**content, "header": known["header"], "releases": releases}',
        'known = {**known, "header": content["header"]}\n    grown = {**content, "releases": releases}',
        (HEADERS,),
    ),
    Mutant(
        "every_line_is_an_entry",
        "an entry that grew would count once for each of its lines",
        REGISTER,
        'entries[record["records"], record["id"]] = record',
        'entries[str(number), record["id"]] = record',
        (GROWS,),
    ),
    Mutant(
        "a_run_has_one_set_of_records",
        "a run that is booked for other records too would not count there",
        REGISTER,
        '(entry["records"], entry["id"]) == (key, identity)',
        'entry["id"] == identity',
        (f"{REGISTERS}::test_the_same_run_under_other_records_counts_there_too",),
    ),
    Mutant(
        "first_kind_of_release_alone_is_written",
        "of a run whose releases differ, the others would be free",
        REGISTER,
        "for release, count in composition.items()]",
        "for release, count in list(composition.items())[:1]]",
        (f"{REGISTERS}::test_every_kind_of_release_has_its_price",),
    ),
    Mutant(
        "first_kind_of_release_alone_is_priced",
        "of a run whose releases differ, the others would be free",
        REGISTER,
        'int(count) for release, count in content["releases"]})',
        'int(count) for release, count in content["releases"][:1]})',
        (f"{REGISTERS}::test_every_kind_of_release_has_its_price",),
    ),
    Mutant(
        "filter_not_written",
        "a cell whose noise moved would have no bound in the register, or another than its filter's",
        REGISTER,
        'return {"header": header.to_dict(), "releases": releases}',
        'return {"header": header.to_dict() | {"renyi_filter": None}, "releases": releases}',
        ("tests/privacy/test_register_cells.py::test_a_cell_that_moved_its_noise_counts_as_the_budget_of_its_filter",),
    ),
    Mutant(
        "other_register_not_told_of",
        "who runs a study and dptune tune on one file would believe either register",
        REGISTER,
        "if real != self.path.resolve()",
        "if real == self.path.resolve()",
        (f"{REGISTERS}::test_another_register_of_the_same_records_is_told_of",),
    ),
    Mutant(
        "canaries_of_another_split",
        "cells would train on the records of before, and count as those of now",
        SPLIT,
        "if not same or (planted.record[known:] >= 0).any():",
        "if known < 0:",
        (f"{CELLS}::test_cells_refuse_canaries_that_were_planted_among_other_records",),
    ),
    Mutant(
        "canaries_of_a_longer_split",
        "records that have left the split since would train, and count for nobody",
        SPLIT,
        "if not same or (planted.record[known:] >= 0).any():",
        "if not same:",
        (f"{CELLS}::test_cells_refuse_canaries_that_were_planted_among_other_records",),
    ),
    Mutant(
        "digest_of_the_first_files",
        "a process that lives on while data are made again would count under the digest of before",
        SPLIT,
        "def split_digest() -> str:",
        '@__import__("functools").cache\ndef split_digest() -> str:',
        (f"{CELLS}::test_the_digest_of_the_records_follows_the_files_in_one_process",),
    ),
    Mutant(
        "answers_count_one_by_one",
        "a process that dies would have answered more than the register counts",
        DEPLOYMENT,
        "book(ensemble, header, planned_answers(protocol), register,",
        "book(ensemble, header, planned_answers(protocol, 1), register,",
        (f"{BOOKINGS}::test_the_whole_budget_counts_before_the_first_answer_and_once",),
    ),
    Mutant(
        "answers_without_their_entry",
        "an ensemble would answer though nothing could be written into the register",
        BOOKING,
        "    except OSError as error:\n",
        "    except OSError as error:\n        return [str(error)]\n",
        (f"{BOOKINGS}::test_nothing_is_answered_that_no_register_counts",),
    ),
    Mutant(
        "ensembles_set_aside_are_forgotten",
        "what an ensemble of an earlier version answered would count nowhere",
        BOOKING,
        "for folder in earlier_runs(ensemble):",
        "for folder in earlier_runs(ensemble)[:0]:",
        (f"{BOOKINGS}::test_what_was_set_aside_counts_with_the_budget_or_with_what_it_answered",),
    ),
    Mutant(
        "lost_answers_are_free",
        "an ensemble whose ledger was lost would count for nothing",
        BOOKING,
        "        register.add_answers(records, replace(header, run_id=_run_id(folder)), Counter())\n",
        "",
        (f"{BOOKINGS}::test_what_was_set_aside_counts_with_the_budget_or_with_what_it_answered",),
    ),
    Mutant(
        "deltas_of_answers_are_free",
        "the guarantee of all together would have a smaller delta than it has",
        REGISTER,
        "        sum(one.delta for one in found),\n",
        '        sum(one.delta for one in found if one.what != "answers"),\n',
        (f"{REGISTERS}::test_the_deltas_of_answers_add_up_too",),
    ),
    Mutant(
        "records_in_shards_are_free",
        "what an ensemble answers would cost no record anything",
        REGISTER,
        "_total(_alike(units[records]), found)",
        '_total(_alike(units[records]), [one for one in found if one.what != "answers"])',
        (
            "tests/mechanisms/test_planning.py::"
            "test_the_claim_of_plrvo_is_met_at_the_dimension_that_it_was_calibrated_at",
            "tests/tasks/test_mechanism_cells.py::test_plrvo_claims_its_budget_at_the_number_of_parameters_that_train",
        ),
    ),
    Mutant(
        "twin_of_as_many_records",
        "a twin would tell how many records the patients have, which is private",
        "tasks/search/run.py",
        "twin_source(units, kind, seed)",
        "twin_source(len(sides.train), kind, seed)",
        ("tests/tasks/test_search_twin.py::test_a_twin_has_as_many_patients_where_they_are_the_units",),
    ),
)
