"""Answers in place of weights: the law of a token, and the budget of all of them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PREDICTOR = "dptune/prediction/predictor.py"
MOLLIFY = "dptune/prediction/mollify.py"
MIXTURE = "dptune/prediction/mixture.py"
SLOTS = "dptune/prediction/fixed_mixture.py"
PROTOCOLS = "dptune/prediction/protocols.py"
PARTITION = "dptune/prediction/partition.py"
DEPLOYMENT = "dptune/prediction/deployment.py"
ANSWERS = "tests/prediction/test_predictor.py"
UNITS = "tests/prediction/test_units.py"
DRAW = "tests/prediction/test_draw.py"
LAWS = "tests/prediction/test_fixed_mixture.py"
SHARDS = f"{LAWS}::test_a_shard_more_or_less_never_shows_beyond_its_certificate[0.2-3-8]"
RECORDS = f"{LAWS}::test_a_record_more_or_less_never_shows_beyond_its_certificate[0.2-3-8]"
ENSEMBLE = "tests/prediction/test_ensemble.py"

MUTANTS = (
    Mutant(
        "token_in_any_case",
        "a token that was told with other capitals would be let in, and far fewer guesses find it",
        "dptune/prediction/service.py",
        "compare_digest(credentials.credentials.encode(), str(token).encode())",
        "compare_digest(credentials.credentials.casefold().encode(), str(token).casefold().encode())",
        (f"{ANSWERS}::test_without_the_token_nothing_is_told_or_spent",),
    ),
    Mutant(
        "answer_before_its_charge",
        "a process that dies after the pass has answered for nothing",
        PREDICTOR,
        "self._ledger.charge(self.protocol.release)",
        "self._draw(context)\n            self._ledger.charge(self.protocol.release)",
        (f"{DRAW}::test_every_token_is_on_the_disk_before_its_pass_and_its_coins",),
    ),
    Mutant(
        "private_branch_too_often",
        "the public weight is what the proof rests on",
        PREDICTOR,
        "return tokens[coin < (1 - self.protocol.public_weight) * weight]",
        "return tokens[coin < weight]",
        (f"{ANSWERS}::test_tokens_follow_the_whole_law",),
    ),
    Mutant(
        "units_priced_by_the_shard_bound",
        "a shard's removal is bounded by less than a unit's change of its model, by a factor of nearly four",
        PREDICTOR,
        'if protocol.unit == "shard":',
        'if protocol.unit != "record":',
        (f"{UNITS}::test_a_unit_that_turns_its_model_around_stays_within_what_it_is_promised",),
    ),
    Mutant(
        "records_priced_by_the_shard_bound",
        "the same for single records",
        PREDICTOR,
        'if protocol.unit == "shard":',
        'if protocol.unit != "patient":',
        (f"{UNITS}::test_a_unit_that_turns_its_model_around_stays_within_what_it_is_promised",),
    ),
    Mutant(
        "time_tells_of_the_laws",
        "a search that ends early shows how far apart two models are",
        PREDICTOR,
        "private[None, None], steady=True))",
        "private[None, None], steady=False))",
        (f"{ANSWERS}::test_tokens_follow_the_whole_law",),
    ),
    Mutant(
        "answers_side_by_side",
        "two threads could charge one token",
        PREDICTOR,
        'tokenizer of its base")\n        with self._lock:',
        'tokenizer of its base")\n        with threading.Lock():',
        (f"{ANSWERS}::test_many_threads_never_overspend",),
    ),
    Mutant(
        "spend_told_a_token_short",
        "a client would be told less than was spent",
        PREDICTOR,
        "return smallest_epsilon(planned_answers(self.protocol, count), self.protocol.delta) if count else 0.0",
        "return smallest_epsilon(planned_answers(self.protocol, count - 1), self.protocol.delta) if count > 1 else 0.0",
        (f"{ANSWERS}::test_answers_end_with_the_budget",),
    ),
    Mutant(
        "charges_not_remembered",
        "an older copy of the ledger would be a fresh budget",
        PREDICTOR,
        "self._remember(self._ledger)",
        "pass",
        (f"{ANSWERS}::test_an_older_copy_of_the_ledger_is_no_fresh_budget",),
    ),
    Mutant(
        "rare_tokens_betray_their_model",
        "a token that the public model never gives in 52 bits would be proof of a private one",
        PREDICTOR,
        "truncate_laws(*next_log_probabilities(self._model, self._adapters, context, [PUBLIC, slot]))",
        "next_log_probabilities(self._model, self._adapters, context, [PUBLIC, slot])",
        (f"{DRAW}::test_no_draw_is_from_a_law_with_a_token_that_the_public_model_never_says",),
    ),
    Mutant(
        "one_slot_for_all",
        "a slot that is asked every time is no mixture of N",
        PREDICTOR,
        "slot = min(int(pick * self.protocol.models), self.protocol.models - 1)",
        "slot = 0",
        (f"{ANSWERS}::test_tokens_follow_the_whole_law",),
    ),
    Mutant(
        "one_direction_only",
        "a divergence that is bounded from the public law need not be bounded towards it",
        MOLLIFY,
        "return torch.maximum(forward, backward)",
        "return forward",
        ("tests/prediction/test_mollify.py::test_weights_are_feasible_and_nothing_much_larger_is",),
    ),
    Mutant(
        "tokens_that_only_private_models_say",
        "such a token has an infinite divergence",
        MOLLIFY,
        "return torch.where(only_private | unknown, 0.0, found)",
        "return torch.where(unknown, 0.0, found)",
        ("tests/prediction/test_mollify.py::test_a_token_that_only_private_models_say_gets_no_weight",),
    ),
    Mutant(
        "the_infeasible_end_of_the_bracket",
        "the weight would lie just beyond its bound",
        MOLLIFY,
        "return low\n",
        "return high\n",
        ("tests/prediction/test_mollify.py::test_a_scalar_root_finder_finds_the_same",),
    ),
    Mutant(
        "moments_with_a_wrong_sign",
        "the part of the law that cannot move would count as if it could",
        MOLLIFY,
        "+ (1 - k) * math.log1p(-share)",
        "+ (k - 1) * math.log1p(-share)",
        ("tests/prediction/test_mollify.py::test_moments_find_the_largest_weight",),
    ),
    Mutant(
        "a_model_moves_from_the_public_one_only",
        "a model that becomes another moves twice as far as one that goes away",
        MOLLIFY,
        "powers * math.log(2 * share)",
        "powers * math.log(share)",
        (f"{UNITS}::test_a_unit_that_turns_its_model_around_stays_within_what_it_is_promised",),
    ),
    Mutant(
        "margins_on_the_wrong_side",
        "rounding would be given away, not kept",
        MOLLIFY,
        "limits - (limits * _MARGIN).clamp(min=_LEAST_MARGIN)",
        "limits + (limits * 1e-3)",
        ("tests/prediction/test_mollify.py::test_a_scalar_root_finder_finds_the_same",),
    ),
    Mutant(
        "a_private_set_of_tokens",
        "which tokens are kept would follow the records",
        MIXTURE,
        "kept = log_public >= _RAREST",
        "kept = (log_public >= _RAREST) | (log_private >= _RAREST)",
        (f"{ANSWERS}::test_a_token_that_no_draw_gives_is_no_proof",),
    ),
    Mutant(
        "whole_law_without_its_public_weight",
        "what is scored would not be what is answered",
        MIXTURE,
        "return weights * (1 - slots.public_weight) / slots.models",
        "return weights / slots.models",
        ("tests/prediction/test_fixed_mixture.py::test_the_certificates_are_reached",),
    ),
    Mutant(
        "floor_of_a_whole_law",
        "the part that one slot moves would be taken for all of it",
        SLOTS,
        "return self.public_weight + (1 - self.public_weight) / self.models",
        "return (1 - self.public_weight) / self.models",
        (f"{LAWS}::test_the_constants_of_the_spec",),
    ),
    Mutant(
        "share_of_the_whole_law",
        "a slot's weight within the part that it moves is larger than within the whole",
        SLOTS,
        "return (1 - self.public_weight) / self.models / self.floor",
        "return (1 - self.public_weight) / self.models",
        ("tests/prediction/test_fixed_mixture.py::test_the_constants_of_the_spec",),
    ),
    Mutant(
        "tokens_beyond_their_budget",
        "T tokens would cost more than the budget says",
        PROTOCOLS,
        "return self.rdp_budget / self.tokens * (1 - _ROUNDING)",
        "return self.rdp_budget / self.tokens * (1 + 1e-6)",
        (f"{LAWS}::test_all_tokens_together_keep_the_budget_and_one_more_does_not",),
    ),
    Mutant(
        "theorem_5_1_taken_for_proven",
        "PMixed as published has a proof for one model only",
        PROTOCOLS,
        "if self.models == 1:",
        "if True:",
        ("tests/prediction/test_pmixed_published.py::test_more_models_than_one_have_no_proof",),
    ),
    Mutant(
        "fractional_orders_for_records",
        "the bound for records is proven at whole orders",
        PROTOCOLS,
        'if self.unit != "shard" and not (',
        "if False and not (",
        (f"{LAWS}::test_bad_options_are_refused_by_name",),
    ),
    Mutant(
        "shards_without_salt",
        "a guess of a record could be tested against its shard",
        PARTITION,
        "hmac.digest(salt,",
        'hmac.digest(b"",',
        (f"{ENSEMBLE}::test_the_partition_is_keyed_and_even",),
    ),
    Mutant(
        "shards_by_place",
        "one record more would move all records after it to other shards",
        PARTITION,
        "shards[shard_of(text, int(unit), key, models, salt)].append(index)",
        "shards[index % models].append(index)",
        (f"{ENSEMBLE}::test_a_record_more_or_less_changes_one_shard_only",),
    ),
    Mutant(
        "units_by_record",
        "a unit would be in many shards, and protected in none",
        PARTITION,
        "name = text if key == RECORD else str(unit)",
        "name = text",
        (f"{ENSEMBLE}::test_a_patient_is_in_one_shard_and_equal_texts_too",),
    ),
    Mutant(
        "the_note_is_not_read",
        "a ledger that was cut or put back would be a fresh budget",
        DEPLOYMENT,
        "        if known is not None:\n            _check_known(",
        "        if False:\n            _check_known(",
        (f"{ANSWERS}::test_an_older_copy_of_the_ledger_is_no_fresh_budget",),
    ),
    Mutant(
        "a_lost_ledger_is_a_new_one",
        "whoever removes the ledger would get the budget again",
        DEPLOYMENT,
        "        if known and known.releases:\n            gone",
        "        if False:\n            gone",
        (f"{ANSWERS}::test_a_lost_or_swapped_ledger_is_no_fresh_budget",),
    ),
    Mutant(
        "units_of_shards_by_record",
        "a unit is in many such shards",
        DEPLOYMENT,
        'if protocol.unit not in ("shard", RECORD, manifest.key):',
        "if False:",
        (f"{ANSWERS}::test_a_patient_is_protected_only_where_shards_go_by_patient",),
    ),
    Mutant(
        "answers_of_a_fixed_seed",
        "whoever knows the seed knows slot and branch",
        DEPLOYMENT,
        "leaks=entropy.leaks,",
        "leaks=(),",
        (f"{ANSWERS}::test_a_fixed_seed_is_refused",),
    ),
    Mutant(
        "dropout_couples_shards",
        "a record in one shard would move the masks of the next",
        "dptune/prediction/ensemble.py",
        "torch.manual_seed(tuning.seed + shard)",
        "pass",
        (f"{ENSEMBLE}::test_dropout_does_not_couple_shards",),
    ),
)
