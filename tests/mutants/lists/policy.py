"""Bugs in policy gradient that would let a user's data reach others by another way than the noisy mean."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SHARED = "dptune/policy/learner.py"
MET = "dptune/policy/met.py"
AGGREGATE = "dptune/policy/aggregate.py"
METHOD = "dptune/policy/method.py"
LOCAL = "dptune/policy/local.py"
OPENING = "dptune/policy/opening.py"
TRAINING = "dptune/policy/environments/training.py"
LEARNER = "dptune/policy/environments/learner.py"
UCB_VI = "dptune/policy/environments/ucb_vi.py"
PROMPT_LEARNER = "dptune/policy/language/learner.py"
PROMPT_TRAINING = "dptune/policy/language/training.py"
TENANTS = "dptune/policy/tenants/training.py"
RUNS = "tests/policy/environments/test_training.py"
CARRIED = "tests/policy/environments/test_carried_over.py"
PROMPTS = "tests/policy/language/test_rlhf.py"
META = "tests/policy/tenants/test_tenants.py"
META_NOISE = "tests/policy/tenants/test_tenants_noise.py"

#: Lines that charge and then draw, which every policy run shares, and the same lines in the wrong order.
CHARGED_FIRST = (
    "    ledger.charge(method.release(number))\n"
    "    return noisy_means(updates, radii, method.multipliers, users, entropy)\n"
)
DRAWN_FIRST = (
    "    means = noisy_means(updates, radii, method.multipliers, users, entropy)\n"
    "    ledger.charge(method.release(number))\n    return means\n"
)

MUTANTS = (
    Mutant(
        "public_critic_of_users",
        "a critic that is called public would carry users' trajectories into later updates",
        TRAINING,
        'simulated = streams["public"].meet(number, learner.policy, after.policy)',
        "simulated = trajectories",
        (CARRIED,),
    ),
    Mutant(
        "simulated_users_are_the_users",
        "the public stream would replay the users' own episodes",
        TRAINING,
        "training.steps, seed + _PUBLIC)",
        "training.steps, seed + _USERS)",
        (CARRIED,),
    ),
    Mutant(
        "fisher_matrix_of_users",
        "the clip radius would follow users' trajectories, at no charge",
        TRAINING,
        'radius, size = learner.radius(state, number, streams["public"])',
        'radius, size = learner.radius(state, number, streams["users"])',
        (CARRIED,),
    ),
    Mutant(
        "noise_on_the_policy_alone",
        "the private critic would be released as it is",
        LEARNER,
        'after.critic, after.last["critic"] = state.critic + means[1], means[1]',
        'after.critic, after.last["critic"] = state.critic + blocks[1].mean(dim=0).float(), means[1]',
        (CARRIED,),
    ),
    Mutant(
        "moments_of_the_raw_update",
        "the next users' Adam would start from the exact mean",
        LEARNER,
        'state.critic, {"policy": means[0]})',
        'state.critic, {"policy": blocks[0].mean(dim=0).float()})',
        (CARRIED,),
    ),
    Mutant(
        "policy_charged_after_its_release",
        "a process that dies between the two has released for nothing",
        SHARED,
        CHARGED_FIRST,
        DRAWN_FIRST,
        (f"{RUNS}::test_the_ledger_is_charged_before_the_noise_is_drawn",),
    ),
    Mutant(
        "users_come_twice",
        "a user in two updates pays twice",
        TRAINING,
        "register.admit(trajectories.users)",
        "pass",
        (f"{RUNS}::test_episodes_that_span_updates_are_refused_by_the_assertion",),
    ),
    Mutant(
        "dead_updates_made_again",
        "users of charged updates would be met again after a restart",
        SHARED,
        "for number in range(ledger.releases, updates):",
        "for number in range(updates):",
        (f"{RUNS}::test_a_run_that_died_goes_on_with_new_users_and_loses_no_charge",),
    ),
    Mutant(
        "raw_critic_no_leak",
        "the paper's critic would have a certified epsilon",
        METHOD,
        'raw_inputs=(RAW_CRITIC,) if self.critic == "raw" else (),',
        "raw_inputs=(),",
        ("tests/policy/test_method.py::test_a_raw_critic_certifies_nothing",),
    ),
    Mutant(
        "critic_and_policy_at_full_noise_each",
        "two blocks at z each are one release at z / sqrt 2",
        METHOD,
        "self.noise_multiplier / math.sqrt(share)",
        "self.noise_multiplier",
        ("tests/policy/test_method.py::test_policy_and_critic_share_one_mechanism",),
    ),
    Mutant(
        "every_update_of_other_users",
        "a run that meets users again would still be priced by its dearest part",
        METHOD,
        "part=part,\n",
        "part=None,\n",
        ("tests/policy/test_method.py::test_the_length_of_a_run_costs_nothing_and_reuse_does",),
    ),
    Mutant(
        "noise_of_one_user",
        "noise on the sum is divided by the users once, not twice",
        AGGREGATE,
        "scales = [radius * multiplier for",
        "scales = [radius * multiplier / users for",
        ("tests/policy/test_aggregate.py::test_noise_of_the_mean_is_z_times_radius_over_users",),
    ),
    Mutant(
        "divided_by_who_is_there",
        "the number of users with an update is private",
        AGGREGATE,
        "return [total / users for total",
        "users = max(1, int(clipped[0].any(dim=1).sum()))\n    return [total / users for total",
        ("tests/policy/test_aggregate.py::test_a_null_user_counts_in_the_divisor",),
    ),
    Mutant(
        "clipped_to_twice_the_radius",
        "a user would move the release twice as far",
        AGGREGATE,
        "return rows * (radius / lengths.clamp(min=radius))",
        "return rows * (2 * radius / lengths.clamp(min=2 * radius))",
        ("tests/policy/test_aggregate.py::test_no_row_is_longer_than_the_radius_whatever_it_holds",),
    ),
    Mutant(
        "nobody_moves_with_momentum",
        "a user who is not there would move the others",
        LOCAL,
        "return project_to_ball(own - start, steps.radius) * row_mask.any(dim=1, keepdim=True)",
        "return project_to_ball(own - start, steps.radius)",
        ("tests/policy/test_local.py::test_a_null_user_does_not_move_even_with_momentum",),
    ),
    Mutant(
        "advantages_normalised_over_users",
        "each user would move all others' advantages",
        LOCAL,
        "return centred / ((centred.square().sum(dim=1, keepdim=True) / counts).sqrt() + 1e-8)",
        "return centred / ((centred.square().sum() / counts.sum()).sqrt() + 1e-8)",
        ("tests/policy/test_local.py::test_normalised_is_each_users_own",),
    ),
    Mutant(
        "episodes_never_reset",
        "a user's episode would go on in another update",
        "dptune/policy/environments/rollout.py",
        "if self._observations is None or not self._continuing:",
        "if self._observations is None:",
        (f"{RUNS}::test_every_user_starts_in_a_fresh_environment",),
    ),
    Mutant(
        "nobody_is_remembered",
        "a user who comes twice would not be noticed",
        MET,
        "self._users.add(user)",
        "pass",
        (f"{RUNS}::test_a_user_who_comes_twice_is_refused",),
    ),
    Mutant(
        "another_schedule_resumed",
        "other numbers of users would meet some of them twice",
        OPENING,
        "Ledger.open(RunFolder(directory).ledger, _with_schedule(header, schedule), planned, booked)",
        "Ledger.open(RunFolder(directory).ledger, header, planned, booked)",
        (f"{RUNS}::test_a_run_is_not_resumed_with_another_schedule",),
    ),
    Mutant(
        "policy_header_hides_its_seed",
        "a fixed seed would be certified",
        OPENING,
        "if entropy.leaks != header.leaks:",
        "if False:",
        (f"{RUNS}::test_the_header_must_declare_the_entropy",),
    ),
    Mutant(
        "baseline_of_users_rewards",
        "each user would move all others' updates through the mean reward",
        PROMPT_TRAINING,
        "        blocks.append(learner.updates(state.adapter, rollouts, baseline, present)[: len(some)])\n",
        "        baseline = float(rollouts.rewards.mean())\n"
        "        blocks.append(learner.updates(state.adapter, rollouts, baseline, present)[: len(some)])\n",
        (f"{PROMPTS}::test_what_a_user_earns_moves_nothing_that_others_compute_with",),
    ),
    Mutant(
        "coins_of_prompts_ignored_in_a_step",
        "a canary that its coin left out would take part, and the audit see nothing",
        PROMPT_TRAINING,
        "rollouts, baseline, present)[: len(some)])",
        "rollouts, baseline, None)[: len(some)])",
        (f"{PROMPTS}::test_one_user_moves_a_noiseless_update_by_the_sensitivity_at_most",),
    ),
    Mutant(
        "coins_of_prompts_ignored_in_a_cell",
        "a canary that its coin left out would take part, and the audit see nothing",
        "tasks/policy/rlhf.py",
        "[bool(canary.included) for canary in plan.canaries])",
        "[True for canary in plan.canaries])",
        ("tests/tasks/test_rlhf_cells.py::test_coins_decide_who_takes_part_and_all_others_do",),
    ),
    Mutant(
        "coins_of_prompts_all_alike",
        "coins that are not fair void the bound of one run",
        "tasks/policy/rlhf.py",
        "draw_secret(entropy), entropy.getrandbits(1))",
        "draw_secret(entropy), 1)",
        ("tests/tasks/test_rlhf_cells.py::test_coins_and_secrets_are_fair_and_new_every_time",),
    ),
    Mutant(
        "prompts_dealt_by_rank",
        "one record that leaves would move the others to other updates",
        "tasks/policy/rlhf.py",
        "    turn = turns_of(keys, run_id, turns)\n",
        "    turn = turns_of(np.arange(len(keys)), run_id, turns)\n",
        ("tests/tasks/test_rlhf_cells.py::test_a_record_that_leaves_or_is_swapped_moves_no_other_and_no_secret",),
    ),
    Mutant(
        "canaries_hosts_by_rank",
        "one record that leaves the attack split would change all canaries",
        "tasks/policy/rlhf.py",
        'hash_keys(keys_of(hosts, "record"), cell.seed)',
        "hash_keys(np.arange(len(hosts.record)), cell.seed)",
        ("tests/tasks/test_rlhf_cells.py::test_a_host_that_leaves_changes_one_canary",),
    ),
    Mutant(
        "sum_divided_by_those_who_came",
        "the divisor would tell how many came, and one who leaves would move the mean by more",
        AGGREGATE,
        "return [total / users for total in",
        "return [total / len(updates[0]) for total in",
        (f"{PROMPTS}::test_one_user_moves_a_noiseless_update_by_the_sensitivity_at_most",),
    ),
    Mutant(
        "updates_of_as_many_rows_as_come",
        "the number of the others would decide the shape, and with it a kernel",
        PROMPT_TRAINING,
        "blank = [0] * (count - len(some))",
        "blank = [0] * 0",
        (f"{PROMPTS}::test_one_who_leaves_moves_no_other_users_numbers",),
    ),
    Mutant(
        "only_the_first_users_come",
        "whether one takes part would hang on who else does",
        PROMPT_TRAINING,
        "for first in range(0, len(rows), count):",
        "for first in range(0, min(1, len(rows)), count):",
        (f"{PROMPTS}::test_one_who_leaves_moves_no_other_users_numbers",),
    ),
    Mutant(
        "prompts_charged_after_their_release",
        "a process that dies between the two has released for nothing",
        SHARED,
        CHARGED_FIRST,
        DRAWN_FIRST,
        (f"{PROMPTS}::test_a_charged_update_that_died_is_not_made_again",),
    ),
    Mutant(
        "prompts_mean_without_a_release",
        "what users computed would move the adapter as it is, and nothing would be charged",
        PROMPT_TRAINING,
        "(mean,) = release([updates], [learner.radius])",
        "mean = updates.mean(dim=0).float()",
        (f"{PROMPTS}::test_the_noise_is_z_radii_over_the_users",),
    ),
    Mutant(
        "tenants_mean_without_a_release",
        "what tenants computed would move the hyper-policy as it is, and nothing would be charged",
        TENANTS,
        "(mean,) = release([meta_updates(parameters, experiences, radius)], [radius])",
        "mean = meta_updates(parameters, experiences, radius).mean(dim=0).float()",
        (META_NOISE,),
    ),
    Mutant(
        "half_the_noise_on_prompts",
        "mu would be twice what is certified",
        SHARED,
        "radii, method.multipliers, users, entropy)",
        "radii, [z / 2 for z in method.multipliers], users, entropy)",
        (f"{PROMPTS}::test_the_noise_is_z_radii_over_the_users",),
    ),
    Mutant(
        "one_stream_of_samples",
        "one user's length would move the next user's randomness",
        PROMPT_LEARNER,
        "np.random.default_rng([seed, stream, number % 2**64]).random(length) for number in numbers]",
        "np.random.default_rng([seed, stream, len(numbers)]).random(length) for number in numbers]",
        (f"{PROMPTS}::test_one_user_moves_a_noiseless_update_by_the_sensitivity_at_most",),
    ),
    Mutant(
        "half_the_noise_on_tenants",
        "mu would be twice what is certified",
        SHARED,
        "radii, method.multipliers, users, entropy)",
        "radii, [z / 2 for z in method.multipliers], users, entropy)",
        (META_NOISE,),
    ),
    Mutant(
        "tenants_noise_of_a_seed",
        "noise that anybody can draw again",
        SHARED,
        "    return noisy_means(updates, radii, method.multipliers, users, entropy)",
        "    from dptune.privacy.entropy import FixedSeed\n\n"
        "    return noisy_means(updates, radii, method.multipliers, users, FixedSeed(number))",
        (META_NOISE,),
    ),
    Mutant(
        "tenants_charged_after_their_release",
        "a process that dies between the two has released for nothing",
        SHARED,
        CHARGED_FIRST,
        DRAWN_FIRST,
        (f"{META}::test_training_over_tenants_costs_one_update_and_new_tenants_start_from_it",),
    ),
    Mutant(
        "tenants_come_twice",
        "a tenant in two updates pays twice",
        TENANTS,
        "UserRegister().admit(tuple(tenant.number for tenant in tenants[:needed]))",
        "pass",
        (f"{META}::test_a_tenant_who_comes_twice_is_refused_before_anything_is_charged",),
    ),
    Mutant(
        "tenants_met_again_after_death",
        "a restart would forget whom it met",
        SHARED,
        "for number in range(ledger.releases, updates):",
        "for number in range(updates - ledger.releases):",
        (f"{META}::test_a_training_that_was_cut_off_goes_on_with_tenants_it_has_not_met",),
    ),
    Mutant(
        "a_tenants_failure_is_told",
        "whether a training dies may depend on one tenant's records",
        "dptune/policy/tenants/experience.py",
        "    except Exception:\n        return None",
        "    except Exception:\n        raise",
        (f"{META}::test_a_tenant_without_records_or_with_a_run_that_fails_contributes_nothing",),
    ),
    Mutant(
        "tenants_normalised_together",
        "each tenant would move all others' gradients",
        TENANTS,
        "normalise_advantages(gains, row_mask) * row_mask).mean(dim=1).sum()",
        "normalise_advantages(gains.flatten()[None], row_mask.flatten()[None]).view_as(gains) * row_mask)"
        ".mean(dim=1).sum()",
        (f"{META}::test_a_tenant_moves_the_mean_by_radius_over_constant_k_at_most_and_a_null_one_by_nothing",),
    ),
    Mutant(
        "held_out_by_tenant",
        "the hash that chose the tenant would choose who is held out: all of some tenants, none of others",
        "dptune/policy/tenants/runs.py",
        "hash_keys(keys[members]) // np.uint64(count) % np.uint64(_HELD_OUT) == 0",
        "hash_keys(keys[members]) % np.uint64(_HELD_OUT) == 0",
        (f"{META}::test_a_quarter_of_every_tenants_patients_is_held_out_whichever_tenant_it_is",),
    ),
    Mutant(
        "tree_of_one_level",
        "an episode is part of a node on every level",
        UCB_VI,
        "return self.noise_multiplier * math.sqrt(3 * self.horizon * self.levels)",
        "return self.noise_multiplier * math.sqrt(3 * self.horizon)",
        ("tests/policy/environments/test_ucb_vi.py::test_no_episode_is_longer_than_the_sensitivity",),
    ),
    Mutant(
        "counters_off_the_grid",
        "low bits of noise and count tell what was counted",
        UCB_VI,
        "(noisy,) = rounded_sums([torch.from_numpy(total)], (normal,), [self._deviation], [self._deviation])",
        "noisy = torch.from_numpy(total) + self._deviation * normal",
        ("tests/policy/environments/test_ucb_vi.py::test_noisy_counters_lie_on_the_public_grid",),
    ),
    Mutant(
        "step_audited_at_twice_the_noise",
        "an audit of another step than the ledger charged finds nothing",
        "tasks/audit/attacks.py",
        'options["noise_multiplier"] = charged.noise_multiplier',
        'options["noise_multiplier"] = 2 * charged.noise_multiplier',
        ("tests/tasks/test_audited_step.py",),
    ),
)
