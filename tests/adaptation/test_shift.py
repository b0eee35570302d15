"""How far a window is from the source by what batch-norm layers keep of it, in units of the window's noise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttac
from ttac.adaptation.shift import PARTS, SourceShift
from ttac.model.networks import ResNet


def measured(layer: nn.Module, window: Tensor) -> SourceShift:
    network = nn.Sequential(layer).eval()
    shift = SourceShift(network, network.state_dict())
    with shift.measured():
        network(window)
    return shift


def maps(count: int, mean: float = 0.0, seed: int = 0) -> Tensor:
    """Maps whose images differ in their mean, as photographs do, so that positions are no samples of their own."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 6, 1, 1, generator=generator)
    return mean + (images + torch.randn(count, 6, 4, 4, generator=generator)) / 2**0.5


def test_a_layer_compares_normal_distributions_in_units_of_the_parts_differences() -> None:
    layer = nn.BatchNorm2d(6)
    layer.running_mean = torch.linspace(-1, 1, 6)
    layer.running_var = torch.linspace(0.5, 2, 6)
    window = maps(40)
    ridge = float(layer.running_var.max()) / 30

    def normals(part: Tensor) -> list[torch.distributions.Normal]:
        return [
            torch.distributions.Normal(one.mean(), (one.var(correction=0) + ridge).sqrt()) for one in part.unbind(1)
        ]

    def divergence(some: list[Any], others: list[Any]) -> float:
        kl = torch.distributions.kl_divergence
        return sum(float(kl(a, b) + kl(b, a)) for a, b in zip(some, others, strict=True))

    source = [
        torch.distributions.Normal(mean, (variance + ridge).sqrt())
        for mean, variance in zip(layer.running_mean, layer.running_var, strict=True)
    ]
    whole = normals(window)
    noise = sum(divergence(whole, normals(part)) for part in window.chunk(PARTS)) / PARTS / (PARTS - 1)
    found = float(measured(layer, window).distance)
    assert found == pytest.approx(divergence(source, whole) / noise, rel=1e-3)


def test_windows_of_the_source_are_about_their_noise_away() -> None:
    layer = nn.BatchNorm2d(6)
    distances = torch.tensor([float(measured(layer, maps(64, seed=seed)).distance) for seed in range(100)])
    assert 0.8 < float(distances.mean()) < 1.3
    assert float(measured(layer, maps(64, mean=1.0)).distance) > 20


@pytest.mark.parametrize("window", [torch.randn(2, 6), torch.randn(9, 6)])
def test_vectors_and_small_windows_have_a_distance(window: Tensor) -> None:
    assert math.isfinite(measured(nn.BatchNorm1d(6), window).distance)


@pytest.mark.parametrize("value", [0.3, torch.nan, torch.inf])
def test_a_window_without_a_distance_teaches_fully(value: float) -> None:
    assert measured(nn.BatchNorm1d(6), torch.full((8, 6), value)).weight() == 1.0


def test_within_the_noise_nothing_is_taught_and_beyond_twice_the_noise_all() -> None:
    shift = measured(nn.BatchNorm2d(6), maps(8))
    for distance, weight in ((0.4, 0.0), (1.0, 0.0), (1.25, 0.25), (2.0, 1.0), (30.0, 1.0)):
        shift.distance = distance
        assert shift.weight() == weight


def adapted(images: Tensor, **options: Any) -> tuple[ttac.Adapter, ttac.Adapter]:
    """Adapters of TTAC++ and of BN that have seen images, on a network whose source are images of noise."""
    torch.manual_seed(0)
    network = ResNet(8, 4, width=8)
    network.train()
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = 1.0
    network(torch.rand(512, 3, 16, 16))  # by their own statistics, which stay the stored ones
    classifier = ttac.Classifier(network.eval(), mean=0, std=1)
    stats = ttac.SourceStatistics.infer(classifier)
    usual: dict[str, Any] = {"window": 64, "queue": 0, "passes": 1, "tau_st": 0.0, "flip": False}
    both = (ttac.adapt(classifier, "ttac++", stats=stats, **usual | options), ttac.adapt(classifier, "bn", window=64))
    for adapter in both:
        adapter(images)
    return both


def test_without_source_data_a_window_like_the_source_moves_statistics_alone() -> None:
    images = torch.rand(64, 3, 16, 16)
    ours, bn = adapted(images)
    assert float(ours.last_step.measures["distance to the source"]) < 1.5
    assert all(torch.equal(value, ours.source[name]) for name, value in ours.parameters.items())
    torch.testing.assert_close(ours.predict(images), bn.predict(images))


def test_a_shifted_window_teaches_and_floor_off_always_does() -> None:
    for images, options in ((torch.rand(64, 3, 16, 16) ** 3, {}), (torch.rand(64, 3, 16, 16), {"floor": False})):
        ours, _ = adapted(images, **options)
        assert any(not torch.equal(value, ours.source[name]) for name, value in ours.parameters.items())
