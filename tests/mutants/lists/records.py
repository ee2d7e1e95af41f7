"""Records of one's own: whose they are, on which side, and which of their tokens count."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

RECORD, FIELDS = "dptune/corpus/reading/record.py", "dptune/corpus/reading/fields.py"
SPELLING, SPELLING_TESTS = "dptune/corpus/reading/spelling.py", "tests/corpus/test_spelling.py"
ENCODING, LOSSES = "dptune/training/encoding.py", "dptune/training/losses.py"
READING_TESTS, ENCODING_TESTS = "tests/corpus/test_reading.py", "tests/training/test_encoding.py"

MUTANTS = (
    Mutant(
        "one_text_among_numbers_is_a_number",
        "a cell would train and pay again under the name of a list with a quote in it",
        "tasks/settings/mechanisms.py",
        "return any(isinstance(item, str | bytes | bytearray) for item in items)",
        "return all(isinstance(item, str | bytes | bytearray) for item in items)",
        ("tests/tasks/test_plain_numbers.py::test_no_option_of_any_mechanism_takes_a_text_for_a_number",),
    ),
    Mutant(
        "units_by_their_spelling",
        "a person whose number stands with a space somewhere would be two units, each protected alone",
        SPELLING,
        '" ".join(letters.split())',
        "letters",
        (f"{READING_TESTS}::test_one_unit_has_one_key_however_it_is_written",),
    ),
    Mutant(
        "marks_that_nobody_sees_in_a_name",
        "a person whose number was copied from a page would be two units",
        SPELLING,
        'unicodedata.category(letter) == "Cf" or',
        "False or",
        (f"{SPELLING_TESTS}::test_spellings_of_one_name_are_one_unit",),
    ),
    Mutant(
        "words_for_nothing_are_people",
        "all whose number is missing would be one person",
        SPELLING,
        "bool({word, inner} & MISSING)",
        "False",
        (f"{SPELLING_TESTS}::test_a_word_for_nothing_names_nobody",),
    ),
    Mutant(
        "sides_by_position",
        "whoever leaves would move everybody behind them to another side",
        "dptune/corpus/reading/read.py",
        "keys = np.array([record.unit for record in whole], dtype=np.int64)",
        "keys = np.arange(len(whole))",
        (f"{READING_TESTS}::test_a_unit_that_leaves_moves_nobody_else",),
    ),
    Mutant(
        "nobodys_records_pass",
        "rows without a patient would share a unit, or have none",
        FIELDS,
        "        if name is None or is_missing(name):\n",
        "        if name is None or is_missing(name):\n            return 0\n",
        (f"{READING_TESTS}::test_nobody_is_no_unit",),
    ),
    Mutant(
        "keys_by_what_others_leave_out",
        "one record's tool call would change the keys of all others in a table",
        "dptune/corpus/reading/shapes.py",
        "for name, one in value.items() if one is not None}",
        "for name, one in value.items()}",
        (f"{READING_TESTS}::test_what_others_leave_out_changes_no_key",),
    ),
    Mutant(
        "prompts_count",
        "the model would spend its budget on learning prompts",
        LOSSES,
        "targets, valid = input_ids[:, 1:], mask[:, 1:] == COUNTED",
        "targets, valid = input_ids[:, 1:], mask[:, 1:] != PADDING",
        ("tests/training/test_evaluation.py::test_perplexity_is_that_of_the_tokens_that_count",),
    ),
    Mutant(
        "prompts_have_a_gradient",
        "the same where the loss comes in pieces",
        LOSSES,
        "        valid = mask[:, 1:] == COUNTED\n        counts",
        "        valid = mask[:, 1:] != PADDING\n        counts",
        ("tests/training/test_per_sample.py::test_prompts_are_read_and_have_no_loss",),
    ),
    Mutant(
        "prompts_one_token_longer",
        "the first token of every completion would never be learned",
        ENCODING,
        "np.arange(len(ids)) >= _common_prefix(",
        "np.arange(len(ids)) > _common_prefix(",
        (f"{ENCODING_TESTS}::test_labels_are_those_of_trl_for_prompts_and_completions",),
    ),
    Mutant(
        "prefixes_that_are_none",
        "the tokens of a user would count as an assistant's",
        "dptune/training/chat_template.py",
        "        if self._mark not in other:\n            raise TurnError(count - 1)\n",
        "",
        (f"{ENCODING_TESTS}::test_a_template_that_rewrites_earlier_turns_is_refused_by_name",),
    ),
)
