"""Kinds of bug reports that other projects had: where each is tested, and tests of those that no other file holds."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from scipy.optimize import brentq
from scipy.stats import norm
from tiny_models import gpt2
from tiny_tokenizers import records, tokenizer
from tiny_tuning import QUICK, checkpoint, rows
from transformers import AutoModelForCausalLM

import dptune
from dptune.core.errors import ConfigError
from dptune.privacy.accountants import epsilons
from dptune.privacy.release import Release
from dptune.records.reading.record import PromptTarget
from dptune.training.models.causal import check_causal
from dptune.training.tokens.encoding import tokens_of

#: Tests of each kind of report.
TESTS: dict[str, str] = {
    "families of models": "training/test_rehearsal.py test_all_linear_layers_of_a_family_equal_a_loop_or_are_named, "
    "training/test_lora.py test_a_family_outside_pefts_table_gets_its_attention_projections",
    "Gemma 4's rounding": "training/test_rehearsal.py test_gemma_4_is_taken_at_every_start",
    "a router that is a linear layer": "training/test_rehearsal.py "
    "test_a_router_is_named_and_the_other_layers_can_be_trained",
    "settings at which accountants overflow": "cases/test_reports.py test_votes_cost_what_the_closed_form_says",
    "shapes of chats": "records/test_shapes.py test_rows_of_public_data_sets_are_read",
    "templates whose last answer differs": "training/test_turns.py "
    "test_what_is_learned_is_what_the_template_renders_of_an_assistant",
    "records of Python": "records/test_shapes.py test_columns_are_no_rows, "
    "records/test_values_beyond_python.py test_rows_that_a_library_cannot_give_are_refused",
    "tokenizers with settings of their own": "cases/test_reports.py "
    "test_a_tokenizer_that_cuts_and_pads_by_itself_changes_no_record",
    "models without a table of tokens": "training/test_rehearsal.py "
    "test_an_evaluation_that_fails_at_every_length_is_not_blamed_on_the_length",
    "tools beside a chat": "training/test_trl.py test_tools_and_own_options_reach_the_template_as_in_trl",
    "positions of RoBERTa": "training/test_rehearsal.py "
    "test_roberta_reads_as_many_tokens_as_are_behind_its_padding_token",
    "a refused run in the register": "job/test_broken_models.py test_after_repair_the_same_command_pays_once",
    "the last token of a classifier": "job/test_classify.py "
    "test_a_batch_of_the_delivered_tokenizer_is_scored_as_each_text_alone",
    "an adapter in other hands": "cases/test_reports.py test_a_merged_adapter_is_the_adapter, "
    "training/test_lora.py test_an_output_layer_that_shares_its_weight_with_the_embeddings_is_refused",
    "tables": "records/test_spelling.py test_other_separators_are_read, "
    "records/test_shapes.py test_a_file_of_json_or_gzip_gives_the_rows_that_were_written, "
    "records/test_shapes.py test_a_unit_has_one_key_in_whatever_type_a_table_holds_it",
    "what was deleted in MLflow": "tasks/test_tracking.py "
    "test_what_was_deleted_in_mlflows_page_is_restored_and_goes_on",
    "names in profiles": "tasks/test_profile_names.py test_names_survive_dvcs_parser",
    "records without loss": "job/test_delivered.py test_records_without_a_token_that_counts_refuse_no_run",
    "parameters of Prefect": "flows/test_form.py test_the_flow_itself_takes_none_either",
    "models of texts and images": "job/test_vision_checkpoints.py test_the_adapter_loads_on_the_checkpoints_own_class",
    "columns of labels": "records/test_shapes.py test_a_hidden_label_cannot_be_named",
    "gradient checkpointing": "training/test_checkpointing.py test_gradients_are_those_of_a_loop_over_records",
    "closed files and full disks": "cases/test_closed_files.py test_a_closed_path_is_named_and_nothing_is_left",
    "kills of a search": "cases/test_killed_search.py test_a_search_goes_on_after_a_signal, "
    "job/test_search_scores.py test_a_score_whose_process_died_is_the_same_when_it_is_made_again",
}


@pytest.mark.parametrize("kind", TESTS)
def test_every_kind_has_its_test(kind: str) -> None:
    for place in TESTS[kind].split(", "):
        file, name = place.split()
        assert f"\ndef {name}(" in (Path(__file__).parents[1] / file).read_text()


@pytest.mark.parametrize(
    ("rounds", "noise", "delta"), [(10, 7.58, 1e-5), (1, 1.0, 1e-5), (1000, 50.0, 1e-9), (5, 4.0, 1.1e-18)]
)
def test_votes_cost_what_the_closed_form_says(rounds: int, noise: float, delta: float) -> None:
    """Rounds of votes of which every unit takes part in each, down to a delta below the rounding of 1 - delta."""
    mu = rounds**0.5 / noise

    def beyond(epsilon: float) -> float:
        least = norm.logcdf(-epsilon / mu - mu / 2) + epsilon
        return float(norm.cdf(-epsilon / mu + mu / 2) - torch.tensor(least, dtype=torch.float64).exp()) / delta - 1

    truth = brentq(beyond, 0, 500)
    found = epsilons(Counter({Release(sample_rate=1.0, noise_multiplier=noise): rounds}), delta).certified
    assert truth * (1 - 1e-9) <= found <= truth * 1.001


def test_a_step_that_costs_next_to_nothing_is_not_free() -> None:
    assert epsilons(Counter({Release(sample_rate=0.00105, noise_multiplier=1.0): 1}), 1e-3).certified > 0


def test_a_tokenizer_that_cuts_and_pads_by_itself_changes_no_record() -> None:
    """``tokenizer.json`` holds the lengths of whoever saved it."""
    contents, width = records(PromptTarget("abcdefgh abc", "abc"), PromptTarget("a", "b")), 40
    plain = tokens_of(contents, tokenizer(), width)
    own: Any = tokenizer()
    own.backend_tokenizer.enable_truncation(4)
    own.backend_tokenizer.enable_padding(length=30, pad_id=0, pad_token="<end>")
    found = tokens_of(contents, own, width)
    assert [row.tolist() for row in found.rows] == [row.tolist() for row in plain.rows]


def test_a_merged_adapter_is_the_adapter(tmp_path: Path) -> None:
    """Its base shares the output layer's weight with the embeddings, which merging leaves alone."""
    model = checkpoint()
    dptune.tune(str(model), rows(), epsilon=20, out=tmp_path / "out", **QUICK)

    def base() -> Any:
        return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    assert base().lm_head.weight is not None
    ids = torch.arange(2, 18)[None]
    adapter = str(tmp_path / "out" / "adapter")
    with torch.no_grad():
        merged: Any = PeftModel.from_pretrained(base(), adapter).merge_and_unload()
        merged.save_pretrained(tmp_path / "merged")
        expected = PeftModel.from_pretrained(base(), adapter).eval()(input_ids=ids).logits
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()(input_ids=ids).logits
        assert not torch.allclose(base()(input_ids=ids).logits, expected, atol=1e-3)
    torch.testing.assert_close(again, expected, rtol=0, atol=1e-5)


def test_a_model_that_its_configuration_does_not_fit_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may well be a causal language model: another one is no mending."""
    model = gpt2()

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("split_with_sizes expects split_sizes to sum exactly to 4")

    monkeypatch.setattr(model, "forward", fails)
    with pytest.raises(ConfigError) as refused:
        check_causal("a", model)
    said = str(refused.value)
    assert re.search(r"cannot read a single text \(RuntimeError: split.*; if it is one, mend its config\.json", said), (
        said
    )
