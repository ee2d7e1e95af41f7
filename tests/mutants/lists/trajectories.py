"""Small errors in what a mechanism computes, which no bound on sensitivity shows: an index, a factor, 1e-7."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

GEOCLIP = "dptune/mechanisms/geoclip.py"
ADACLIP = "dptune/mechanisms/adaclip.py"
BANDED = "dptune/mechanisms/banded.py"
LAPLACE = "dptune/mechanisms/laplace_noise.py"
DPPG = ("tests/policy/test_dppg_trajectory.py::test_a_run_is_its_transcription",)
PMIXED = "tests/prediction/test_pmixed_trajectory.py"
TRAJECTORIES = "tests/mechanisms/test_trajectories.py"


def _held(title: str) -> tuple[str, ...]:
    return (f"{TRAJECTORIES}::test_a_mechanism_does_what_its_transcription_does[{title}]",)


MUTANTS = (
    Mutant(
        "a_full_covariance_about_the_new_mean",
        "equations 18 and 20 of GeoClip have a_t",
        GEOCLIP,
        "deviation = gradient - (self._mean if self.rank == 0 else mean)",
        "deviation = gradient - mean",
        _held("geoclip, Algorithm 1"),
    ),
    Mutant(
        "a_streaming_basis_about_the_old_mean",
        "Algorithm 3 of GeoClip has a_(t+1)",
        GEOCLIP,
        "deviation = gradient - (self._mean if self.rank == 0 else mean)",
        "deviation = gradient - self._mean",
        _held("geoclip, Algorithm 3"),
    ),
    Mutant(
        "a_covariance_of_batch_means",
        "it is that of one unit, B times larger (equation 20)",
        GEOCLIP,
        "self._update_full(deviation * math.sqrt(batch))",
        "self._update_full(deviation)",
        _held("geoclip, whole"),
    ),
    Mutant(
        "variances_about_the_old_mean",
        "m moves before v is taken",
        ADACLIP,
        "self._mean = self.mean_decay * self._mean + (1 - self.mean_decay) * gradient\n"
        "        sampled = batch * ((gradient - self._mean).square() - noise_variance)",
        "sampled = batch * ((gradient - self._mean).square() - noise_variance)\n"
        "        self._mean = self.mean_decay * self._mean + (1 - self.mean_decay) * gradient",
        _held("adaclip"),
    ),
    Mutant(
        "half_of_a_unit_on_the_edge",
        "a norm that equals the radius counts as within it",
        "dptune/mechanisms/quantile.py",
        "float(count) / batch + 0.5 for count",
        "(float(count) + 1e-7) / batch + 0.5 for count",
        _held("quantile, papers"),
    ),
    Mutant(
        "the_whole_noise_in_the_expected_error",
        "the gradients' noise is z_T, larger than z",
        "dptune/mechanisms/dc_sgd.py",
        "noise = released.deviations[0] / released.knobs.radii[0]",
        "noise = released.knobs.noise_multiplier",
        _held("dc_sgd_e, memory"),
    ),
    Mutant(
        "the_edge_before",
        "the percentile is the edge that first exceeds the target",
        "dptune/mechanisms/dc_sgd.py",
        "return index * self._stride",
        "return (index - 0.5) * self._stride",
        _held("dc_sgd_p"),
    ),
    Mutant(
        "a_ten_millionth_of_a_radius",
        "no guarantee sees a unit that is shortened a little too much",
        "dptune/mechanisms/clipping.py",
        "return (radius / norms.clamp(min=1e-300)).clamp(max=1.0)",
        "return (radius * (1 - 1e-7) / norms.clamp(min=1e-300)).clamp(max=1.0)",
        _held("static"),
    ),
    Mutant(
        "a_ten_millionth_more_noise",
        "no guarantee sees noise that is a little too large",
        "dptune/mechanisms/noise.py",
        "deviations = [noise_multiplier * scale for scale in scales]",
        "deviations = [noise_multiplier * scale * (1 + 1e-7) for scale in scales]",
        _held("static"),
    ),
    Mutant(
        "a_raw_quantile_of_another_kind",
        "numpy's and torch's quantile is linear between two norms",
        "dptune/mechanisms/autoclip.py",
        ".quantile(self.target)) if",
        '.quantile(self.target, interpolation="lower")) if',
        _held("autoclip_published"),
    ),
    Mutant(
        "a_row_takes_back_another_row",
        "c_i belongs to the row i rows ago",
        BANDED,
        "weights[(row - back) % length] = strategy[back]",
        "weights[(row - back) % length] = strategy[before + 1 - back]",
        _held("banded"),
    ),
    Mutant(
        "one_more_in_the_shape",
        "the tail is (1 + theta x)^-k, the density's exponent k + 1",
        LAPLACE,
        "return steepness.mul_(1 / law.gamma[0])",
        "return steepness.mul_(1 / (law.gamma[0] + 1))",
        _held("plrvo"),
    ),
    Mutant(
        "a_scale_for_a_rate",
        "the authors' code draws the exponential part with its rate as its scale",
        LAPLACE,
        "exponential=a2 / rate",
        "exponential=a2 * rate",
        _held("lmo_dp"),
    ),
    Mutant(
        "values_of_the_same_step",
        "an advantage takes the value of the step after",
        "dptune/policy/environments/rollout.py",
        "discount * values[:, step + 1] * alive",
        "discount * values[:, step] * alive",
        DPPG,
    ),
    Mutant(
        "moments_of_an_ascent",
        "Adam's first moment is a gradient of the loss, minus the released update",
        "dptune/policy/local.py",
        "is None else -last_update",
        "is None else last_update",
        DPPG,
    ),
    Mutant(
        "a_step_size_one_update_late",
        "eta falls after so many users, those of earlier updates",
        "dptune/policy/environments/schedule.py",
        "(number * self.users // self.step_every)",
        "((number - 1) * self.users // self.step_every)",
        DPPG,
    ),
    Mutant(
        "one_place_for_both_tokens",
        "the private token is drawn with a number of its own",
        "dptune/prediction/predictor.py",
        "zip((public, private), places, strict=True)",
        "zip((public, private), places[:1] * 2, strict=True)",
        (f"{PMIXED}::test_answers_are_those_of_the_fixed_mixture",),
    ),
    Mutant(
        "one_order_for_all",
        "amplification takes theorem 5.1 at every order k, not at alpha",
        "dptune/prediction/published.py",
        "moment = (k - 1) * theorem_epsilon(beta, models, k)",
        "moment = (k - 1) * theorem_epsilon(beta, models, order)",
        (f"{PMIXED}::test_published_laws_are_those_of_algorithm_1",),
    ),
    Mutant(
        "weights_of_another_norm",
        "weights are scaled to a sum of squares of 1, not to a sum of 1",
        "dptune/mechanisms/per_pair.py",
        "norm = math.hypot(*weights)",
        "norm = math.fsum(weights)",
        _held("per_pair, weights"),
    ),
)
