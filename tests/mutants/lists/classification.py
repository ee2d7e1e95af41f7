"""Classifiers: heads that train in full, labels that the model must not see, and labels that are public."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PER_SAMPLE, LOSSES, OPENING = (
    f"dptune/training/{name}.py" for name in ("per_sample", "losses", "opening")
)  # fmt: skip
QUALITY, BENCHMARK_TESTS = "tasks/experiment/quality.py", "tests/tasks/test_benchmark_cells.py"
HEAD = "dptune/training/head.py"
HEAD_TESTS, CLASSIFY_TESTS = "tests/training/test_head.py", "tests/tuning/test_classify.py"

MUTANTS = (
    Mutant(
        "weights_beside_the_head_train_in_clear",
        "a weight in no pair and not in the head would train without clipping or noise",
        PER_SAMPLE,
        "    _check_covered(model, blocks)\n    return blocks",
        "    return blocks",
        (f"{HEAD_TESTS}::test_a_trainable_norm_beside_the_head_is_refused",),
    ),
    Mutant(
        "the_label_is_a_token",
        "the model would read the label that it is to predict, and every score would mean nothing",
        LOSSES,
        "seen = attention_mask(mask.masked_fill(counted, PADDING))",
        "seen = attention_mask(mask)",
        (f"{HEAD_TESTS}::test_the_model_never_sees_the_label[gpt2]",),
    ),
    Mutant(
        "biases_without_weights",
        "columns of a bias would hold another sum than its gradient, and be clipped by it",
        PER_SAMPLE,
        "torch.ones_like(inputs[0][..., :1])",
        "inputs[0][..., :1]",
        (f"{HEAD_TESTS}::test_equal_to_a_loop_over_records[roberta]",),
    ),
    Mutant(
        "a_learned_controller_takes_a_head",
        "a controller that was defined for LoRA pairs would move radii by figures of something else",
        OPENING,
        "        mechanism.check_head()",
        "        pass",
        (f"{HEAD_TESTS}::test_learned_controllers_refuse_heads_before_a_charge[rldp]",),
    ),
    Mutant(
        "heads_of_any_start",
        "a run could not be repeated or resumed: its head would start elsewhere each time",
        HEAD,
        "torch.randn(shape, generator=generator)",
        "torch.randn(shape)",
        (f"{HEAD_TESTS}::test_the_start_is_public_and_seeded",),
    ),
    Mutant(
        "delivered_tokenizer_knows_that_it_cut",
        "the folder would tell whether any record was too long",
        "dptune/training/labelled.py",
        "cutting = copy.deepcopy(tokenizer)",
        "cutting = tokenizer",
        ("tests/tuning/test_classify.py::test_whether_a_record_was_too_long_is_not_told_by_the_delivered_tokenizer",),
    ),
    Mutant(
        "head_starts_from_the_clock",
        "the start must be public and known, or it could carry anything",
        "dptune/tuning/job.py",
        "attach_lora(weights, settings.lora, settings.seed, base.head)",
        'attach_lora(weights, settings.lora, int(__import__("time").time()), base.head)',
        ("tests/tuning/test_classify.py::test_the_head_starts_from_the_public_seed",),
    ),
    Mutant(
        "accuracy_under_private_telemetry",
        "a statistic of held-out private records would be published, which no epsilon covers",
        QUALITY,
        'if not is_classifier(spec.model) or prepared.cell.telemetry != "research":',
        "if not is_classifier(spec.model):",
        (f"{BENCHMARK_TESTS}::test_under_private_telemetry_nothing_is_scored",),
    ),
    Mutant(
        "texts_are_scored_under_private_telemetry",
        "scores of held-out private records would be published, and a file of prompts be left",
        QUALITY,
        'if not task.inputs or prepared.cell.telemetry != "research":',
        "if not task.inputs:",
        (f"{BENCHMARK_TESTS}::test_under_private_telemetry_nothing_is_scored",),
    ),
    Mutant(
        "the_attack_side_trains_too",
        "records that attacks take for untrained ones would be trained, and every attack look weak",
        "dptune/corpus/splits.py",
        "    for name, rows in sides.items():",
        '    for name, rows in (sides | {"train": np.arange(len(keys))}).items():',
        (f"{BENCHMARK_TESTS}::test_texts_are_written_and_scored_end_to_end",),
    ),
)
