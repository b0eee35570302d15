"""How strong views may be: found on the first window, followed over the stream, saved and reset with it."""

from __future__ import annotations

import pytest
import torch

import ttac
from ttac.adaptation.strength import LEVELS, PACE, ViewStrength, agreement
from ttac.model.networks import ResNet

CPU = torch.device("cpu")


def test_agreement_counts_confident_samples_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    posterior = torch.rand(200, 5, generator=generator).mul(8).softmax(1)
    strong = torch.randn(200, 5, generator=generator)
    counted = [
        int(strong[row].argmax() == posterior[row].argmax())
        for row in range(200)
        if float(posterior[row].max()) >= 0.95
    ]
    assert 0 < len(counted) < 200
    assert float(agreement(posterior, strong, 0.95)) == pytest.approx(sum(counted) / len(counted))


def test_agreement_counts_all_where_nobody_is_confident() -> None:
    posterior = torch.tensor([[0.6, 0.4], [0.3, 0.7]])
    assert float(agreement(posterior, torch.tensor([[1.0, 0.0], [1.0, 0.0]]), 0.95)) == 0.5


@pytest.mark.parametrize(("slope", "expected"), [(0.0, 1.0), (0.35, 0.25), (2.0, 0.0)])
def test_the_first_window_finds_the_strongest_level_that_agrees(slope: float, expected: float) -> None:
    strength = ViewStrength(0.9, CPU)
    strength.begin(lambda level: 1 - slope * level)
    assert strength.level == expected
    assert strength.known
    assert LEVELS[0] == 1.0


def test_the_level_follows_what_steps_agree_to() -> None:
    strength = ViewStrength(0.9, CPU)
    strength.begin(lambda level: 1 - 0.2 * level)
    begun = strength.level
    for _ in range(20):
        strength.observe(torch.tensor(0.5))
    strength.follow()
    assert strength.level == pytest.approx(begun - PACE)
    for _ in range(40):
        strength.observe(torch.tensor(1.0))
    strength.follow()
    strength.follow()
    assert strength.level == pytest.approx(begun + PACE)


def test_self_training_counts_less_where_views_disagree() -> None:
    strength = ViewStrength(0.9, CPU)
    strength.begin(lambda level: 0.95)
    assert float(strength.weight()) == 1.0
    strength.begin(lambda level: 0.45)
    assert 0 < float(strength.weight()) < 0.1
    assert float(ViewStrength(0.0, CPU).weight()) == 1.0


def test_an_adapter_tells_strength_and_goes_on_with_it_after_a_restart() -> None:
    torch.manual_seed(0)
    classifier = ttac.Classifier(ResNet(8, 4, width=4), mean=0, std=1)
    images = torch.rand(64, 3, 16, 16)
    stats = ttac.SourceStatistics.collect(classifier, [(images, torch.arange(64) % 4)])
    options = {"window": 16, "queue": 0, "passes": 1, "tau_st": 0.0}
    adapter = ttac.adapt(classifier, "ttac++", stats=stats, **options)
    adapter(images[:32])
    told = adapter.last_step.measures
    assert told["view strength"] == adapter.method.strength.level  # type: ignore[attr-defined]
    assert 0 <= float(told["agreement"]) <= 1
    again = ttac.adapt(classifier, "ttac++", stats=stats, **options)
    again.load_state_dict(adapter.state_dict())
    assert torch.equal(again(images[32:]), adapter(images[32:]))
    adapter.reset()
    assert not adapter.method.strength.known  # type: ignore[attr-defined]
