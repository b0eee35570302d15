"""A look at the first images tells wrong pixels from most shifts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import ttac
from ttac import Classifier
from ttac.model.networks import ResNet
from ttac.model.pixel_check import PixelsWarning, warn_of_pixels
from ttac.source.spec import Recipe
from ttac.source.train import train_source

MEAN, STD = 0.4, 0.15


def stripes(count: int = 64) -> tuple[Tensor, Tensor]:
    """Noise of low contrast with stripes along one of two directions, or none."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 3
    images = MEAN + 0.05 * torch.randn(count, 3, 16, 16, generator=generator)
    wave = 0.15 * torch.sign(torch.sin(torch.arange(16) * 1.5))
    images[labels == 1] += wave[:, None]
    images[labels == 2] += wave
    return images.clamp(0, 1), labels


@pytest.fixture(scope="module")
def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        classifier = Classifier(ResNet(8, 3, width=4), mean=MEAN, std=STD)
        images, labels = stripes(192)
        train_source(classifier, (255 * images).byte(), labels, Recipe(epochs=6, batch=32))
    return classifier.model.eval()


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", PixelsWarning)
        yield


@pytest.mark.parametrize(("mean", "std"), [(0, 1), (0, 1 / 255)])
def test_forgotten_pixels_are_noticed(network: nn.Module, mean: float, std: float) -> None:
    images, _ = stripes()
    with pytest.raises(PixelsWarning, match=r"are mean and std right.*first 64 images"):
        warn_of_pixels(Classifier(network, mean=mean, std=std), images)


def test_right_pixels_are_not(network: nn.Module) -> None:
    images, labels = stripes()
    classifier = Classifier(network, mean=MEAN, std=STD)
    assert float((classifier(images).argmax(1) == labels).float().mean()) > 0.9
    generator = torch.Generator().manual_seed(1)
    warn_of_pixels(classifier, images)
    warn_of_pixels(classifier, images[labels == 1])
    warn_of_pixels(classifier, (images + 0.05 * torch.randn(images.shape, generator=generator)).clamp(0, 1))
    warn_of_pixels(classifier, 0.8 * images + 0.1)


def test_what_cannot_be_judged_is_not(network: nn.Module) -> None:
    images, _ = stripes()
    warn_of_pixels(Classifier(network, mean=0, std=1), images[:15])
    plain = ResNet(8, 3, width=4, norm=lambda width: nn.GroupNorm(1, width))
    warn_of_pixels(Classifier(plain, mean=0, std=1), images)
    warn_of_pixels(Classifier(ResNet(8, 3, width=4), mean=0, std=1), images)


def test_it_changes_nothing(network: nn.Module) -> None:
    classifier = Classifier(network, mean=0, std=1).copy().train()
    before = {name: value.clone() for name, value in classifier.state_dict().items()}
    with pytest.raises(PixelsWarning):
        warn_of_pixels(classifier, stripes()[0])
    assert all(torch.equal(value, before[name]) for name, value in classifier.state_dict().items())
    assert all(module.training for module in classifier.modules())
    assert not any(module._forward_pre_hooks for module in classifier.modules())


def test_a_stream_is_looked_at_once_before_anything_is_learned(network: nn.Module) -> None:
    images, labels = stripes()
    adapter = ttac.adapt(Classifier(network, mean=0, std=1), "bn", window=16)
    stream = list(zip(images.split(16), labels.split(16), strict=True))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PixelsWarning)
        ttac.evaluate(adapter, stream, "N-O-SF")
        ttac.evaluate(adapter, stream, "N-O-SF", continuing=True)
    assert [warning.category for warning in caught].count(PixelsWarning) == 1
