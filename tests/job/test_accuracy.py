"""A classifier that is no better than a constant answer is called so, in words."""

from __future__ import annotations

import pytest

from dptune.cli.tune_result import comparison, printed_scores, standard_error


def test_the_standard_error_is_that_of_a_mean_of_coins() -> None:
    assert standard_error(0.5, 100) == pytest.approx(0.05)
    assert standard_error(0.5643, 872) == pytest.approx(0.0168, abs=1e-4)  # 1.7 %, as docs/howto/classify.md has it


@pytest.mark.parametrize(("accuracy", "better"), [(0.4, False), (0.509, False), (0.52, False), (0.564, True)])
def test_within_one_standard_error_it_is_no_better(accuracy: float, better: bool) -> None:
    said = comparison({"accuracy": accuracy, "largest_class": 0.509}, 872)
    head = "Better than a constant answer" if better else "No better than a constant answer"
    assert said.startswith(f"{head}: accuracy {accuracy:g} with a standard error of 0.017 on 872 records;")
    assert said.endswith("always saying the most frequent label has 0.509.")


@pytest.mark.parametrize(
    ("accuracy", "untuned", "head"),
    [
        (0.7, 0.5, "Better than a constant answer, and than no tuning:"),
        (0.7, 0.69, "Better than a constant answer, and no better than no tuning:"),
        (0.6, 0.5, "No better than a constant answer, but better than no tuning:"),
        (0.6, 0.6, "No better than a constant answer, and no better than no tuning:"),
    ],
)
def test_no_tuning_is_compared_too(accuracy: float, untuned: float, head: str) -> None:
    said = comparison({"accuracy": accuracy, "largest_class": 0.6}, 400, {"accuracy": untuned})
    assert said.startswith(head)
    assert said.endswith(f"and the model before tuning had {untuned:g}.")


@pytest.mark.parametrize(("loss", "worse"), [(0.8965, True), (0.6937, False), (0.6, False)])
def test_a_loss_that_rose_is_said(loss: float, worse: bool) -> None:
    """The README's own run: an accuracy of 0.67 after 0.48, and worse probabilities than the untuned model."""
    scores = {"accuracy": 0.67, "largest_class": 0.52, "loss": loss}
    said = comparison(scores, 385, {"accuracy": 0.48, "loss": 0.6937})
    assert ("But its loss rose, 0.8965 after 0.6937" in said) is worse


def test_people_read_what_the_largest_class_is() -> None:
    told = printed_scores({"accuracy": 0.5, "loss": 1.0, "largest_class": 0.6}, 25)
    assert told == {"accuracy": 0.5, "accuracy_standard_error": 0.1, "loss": 1.0, "constant_answer_accuracy": 0.6}
