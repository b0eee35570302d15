"""What the guard measures, against SciPy and loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from guard_helpers import CLASSES, WIDTH, collected, mixed, network, pictures
from scipy import stats as scipy_stats

from ttac import Classifier, SourceStatistics
from ttac.adaptation.measures import (
    AnchorDistance,
    Outputs,
    balance,
    expected_label_entropy,
    information,
    label_entropy,
    mean_entropy,
)


@pytest.fixture
def source() -> Classifier:
    return network()


@pytest.fixture
def statistics(source: Classifier) -> SourceStatistics:
    return collected(source)


def test_entropies_are_those_of_scipy() -> None:
    posteriors = torch.rand(50, 7, generator=torch.Generator().manual_seed(0)).mul(4).softmax(1)
    each = scipy_stats.entropy(posteriors.double().numpy(), axis=1).mean()
    of_mean = scipy_stats.entropy(posteriors.double().numpy().mean(0))
    assert mean_entropy(posteriors) == pytest.approx(each, rel=1e-6)
    assert balance(posteriors) == pytest.approx(math.exp(of_mean), rel=1e-6)
    assert information(posteriors) == pytest.approx(of_mean - each, rel=1e-6)
    labels = torch.tensor([5, 5, 5, 0, 2, 2])
    assert label_entropy(labels) == pytest.approx(scipy_stats.entropy([3, 1, 2]))


PRIORS = (([0.1] * 10, 64), ([1e-3] * 1000, 128), ([0.7, 0.2, 0.05, 0.05, 0.0], 40))


@pytest.mark.parametrize(("prior", "count"), PRIORS)
def test_expected_entropy_is_that_of_many_draws(prior: list[float], count: int) -> None:
    draws = np.random.default_rng(0).multinomial(count, np.array(prior) / sum(prior), size=2000)
    found = scipy_stats.entropy(draws, axis=1)
    expected = expected_label_entropy(torch.tensor(prior), count)
    assert expected == pytest.approx(found.mean(), abs=5 * found.std() / math.sqrt(2000))


def test_distances_are_those_of_a_loop(source: Classifier, statistics: SourceStatistics) -> None:
    measure = AnchorDistance(statistics)
    with torch.no_grad():
        outputs = Outputs(*source.features_and_logits(pictures(mixed(40, seed=2), seed=2)))
    mean, variance = (t.double().numpy() for t in (statistics.classes.mean, statistics.classes.covariance.diagonal()))
    ridge = float(statistics.overall.covariance.diagonal().max()) / 30
    expected, by_class = [], [[] for _ in range(CLASSES)]  # type: ignore[var-annotated]
    for feature, logits in zip(outputs.features.double().numpy(), outputs.logits, strict=True):
        label = int(logits.argmax())
        far = np.mean((feature - mean[label]) ** 2 / (variance[label] + ridge))
        expected.append(far / np.mean(variance[label] / (variance[label] + ridge)))
        by_class[label].append(expected[-1])
    np.testing.assert_allclose(measure.of(outputs).numpy(), expected, rtol=1e-4)
    np.testing.assert_allclose(np.array(measure.by_class(outputs)), [np.mean(each) for each in by_class], rtol=1e-4)


def test_samples_of_the_source_have_a_distance_of_one(source: Classifier, statistics: SourceStatistics) -> None:
    with torch.no_grad():
        outputs = Outputs(*source.features_and_logits(pictures(mixed(2000, seed=5), seed=5)))
    assert float(AnchorDistance(statistics).of(outputs).mean()) == pytest.approx(1, abs=0.05)


def test_inferred_anchors_have_no_scale(source: Classifier) -> None:
    measure = AnchorDistance(SourceStatistics.infer(source, parameterisation="absolute"))
    with torch.no_grad():
        outputs = Outputs(*source.features_and_logits(pictures(mixed(40))))
    longer = Outputs(7 * outputs.features, outputs.logits)
    torch.testing.assert_close(measure.of(longer), measure.of(outputs))


def test_a_class_that_is_not_seen_has_no_distance(statistics: SourceStatistics) -> None:
    outputs = Outputs(torch.zeros(3, WIDTH), torch.eye(CLASSES)[[1, 1, 4]])
    seen = [far is not None for far in AnchorDistance(statistics).by_class(outputs)]
    assert seen == [False, True, False, False, True, False]
