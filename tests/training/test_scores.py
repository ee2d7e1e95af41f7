"""Scores of a classifier equal scikit-learn's, closed forms and a count by hand."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_classifiers import adapted_classifier, labelled, row_loss

from dptune.training.evaluation import label_probabilities, mean_loss, score_classifier, scores_of


def drawn(records: int = 200, labels: int = 4) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(5)
    logits = 2 * generator.normal(size=(records, labels))
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return probabilities, generator.integers(0, labels, size=records)


def test_equal_to_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    probabilities, labels = drawn()
    found, predicted = scores_of(probabilities, labels), probabilities.argmax(axis=1)
    assert found.accuracy == pytest.approx(metrics.accuracy_score(labels, predicted))
    assert found.f1 == pytest.approx(metrics.f1_score(labels, predicted, average="macro"))
    assert found.loss == pytest.approx(metrics.log_loss(labels, probabilities))


def test_counted_by_hand() -> None:
    """Three records of label 0, one of label 1, of which the first and the last two are called 0."""
    probabilities = np.array([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3], [0.7, 0.3]])
    found = scores_of(probabilities, np.array([0, 0, 0, 1]))
    assert found.accuracy == 0.5
    assert found.f1 == pytest.approx((2 * 2 / (3 + 3) + 0) / 2)
    assert found.largest_class == 0.75
    # Bins of 1/15: 0.9 right; 0.8 wrong; 0.7 twice, right and wrong.
    assert found.calibration_error == pytest.approx((abs(0.9 - 1) + 0.8 + abs(1.4 - 1)) / 4)


def test_calibration_of_sure_answers_is_their_share_of_mistakes() -> None:
    probabilities = np.eye(2)[[0, 0, 0, 1]]
    assert scores_of(probabilities, np.array([0, 0, 1, 1])).calibration_error == pytest.approx(0.25)
    assert scores_of(probabilities, np.array([0, 0, 0, 1])).calibration_error == 0


def test_probabilities_are_those_of_each_record_alone() -> None:
    model, tokens = adapted_classifier("roberta"), labelled(7)
    probabilities, labels = label_probabilities(model, tokens, 3)
    losses = np.array([float(row_loss(model, row).detach()) for row in tokens.rows])
    assert labels.tolist() == [int(row[-1]) for row in tokens.rows]
    assert -np.log(probabilities[np.arange(7), labels]) == pytest.approx(losses, rel=1e-4)
    assert mean_loss(model, tokens, 3) == pytest.approx(losses.mean(), rel=1e-4)
    assert score_classifier(model, tokens, 2).loss == pytest.approx(losses.mean(), rel=1e-4)
