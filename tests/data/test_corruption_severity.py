"""A fixed classifier errs more the more severe corruptions are."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from ttac import Classifier
from ttac.data.corruptions import CORRUPTIONS, EXTRA, Corruption
from ttac.data.corruptions.constants import SEVERITIES
from ttac.data.sets.digits import load_digits
from ttac.model.networks import ResNet
from ttac.source.train import Recipe, train_source

pytest.importorskip("sklearn", reason="the digits ship with scikit-learn: pip install 'ttac[demo]'")
SIDE, COUNT = 96, 100  # the size takes ImageNet-C's constants: those of CIFAR-C hardly harm digits


def enlarged(images: torch.Tensor) -> torch.Tensor:
    return (255 * F.interpolate(images, size=(SIDE, SIDE), mode="bilinear")).round().byte()


@pytest.fixture(scope="module")
def errors() -> dict[str, list[float]]:
    """Errors of a network trained on clean digits, by corruption and severity, in percent."""
    images, labels = load_digits("train")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = ResNet(8, 10, channels=1, width=8, stem_stride=6)
    classifier = Classifier(network, mean=[0.3], std=[0.38])
    train_source(classifier, enlarged(images), labels, Recipe(epochs=10, batch=64, flip=False))
    images, labels = load_digits("test")
    images, labels, index = enlarged(images[:COUNT]), labels[:COUNT], torch.arange(COUNT)

    def error(name: str, severity: int) -> float:
        with torch.no_grad():
            predicted = classifier(Corruption(name, severity)(images, index).float() / 255).argmax(1)
        return 100 * float((predicted != labels).float().mean())

    return {name: [error(name, severity) for severity in SEVERITIES] for name in (*CORRUPTIONS, *EXTRA)}


# The published constants of the elastic transform have their largest displacements at severities 1 and 2.
RISING = [name for name in (*CORRUPTIONS, *EXTRA) if name != "elastic_transform"]


def test_the_mean_over_the_rising_corruptions_rises(errors: dict[str, list[float]]) -> None:
    means = [sum(column) / len(RISING) for column in zip(*(errors[name] for name in RISING), strict=True)]
    assert means == sorted(means)
    assert means[-1] > means[0] + 10


@pytest.mark.parametrize(
    "name", ["gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise", "brightness", "frost", "snow"]
)
def test_what_harms_digits_harms_them_more_and_more(name: str, errors: dict[str, list[float]]) -> None:
    first, *_, last = errors[name]
    assert last > first + 15


@pytest.mark.parametrize("name", RISING)
def test_no_corruption_is_milder_at_the_end(name: str, errors: dict[str, list[float]]) -> None:
    assert errors[name][-1] >= errors[name][0] - 5
