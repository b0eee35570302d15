"""Source training learns, repeats itself and refuses what it cannot do; the demo's shifts are strong."""

from __future__ import annotations

import pytest
import torch

from ttac import Classifier
from ttac.benchmark.demo import SHIFTS
from ttac.model.networks import ResNet
from ttac.source.train import Recipe, train_source


def two_kinds(count: int = 96) -> tuple[torch.Tensor, torch.Tensor]:
    """Images that are bright on the top or at the bottom."""
    generator = torch.Generator().manual_seed(0)
    images = 60 * torch.rand(count, 3, 16, 16, generator=generator)
    labels = torch.arange(count) % 2
    images[labels == 0, :, :8] += 150
    images[labels == 1, :, 8:] += 150
    return images.byte(), labels


def test_training_learns_and_repeats_itself() -> None:
    images, labels = two_kinds()
    prints, losses = [], []
    for _ in range(2):
        torch.manual_seed(0)
        classifier = Classifier(ResNet(8, 2, width=4), mean=[0.5] * 3, std=[0.25] * 3)
        train_source(classifier, images, labels, Recipe(epochs=4, batch=16),
                     progress=lambda epoch, epochs, loss: losses.append((epoch, epochs, loss)))  # fmt: skip
        prints.append(classifier.fingerprint())
        assert not classifier.training
        with torch.no_grad():
            assert (classifier(images / 255).argmax(1) == labels).float().mean() > 0.95
    assert prints[0] == prints[1]
    assert [epoch for epoch, _, _ in losses] == [1, 2, 3, 4] * 2
    assert losses[3][2] < losses[0][2]


def test_training_refuses_too_few_images() -> None:
    images, labels = two_kinds(8)
    with pytest.raises(ValueError, match="8 images do not fill one batch of 128: lower batch"):
        train_source(Classifier(ResNet(8, 2, width=4), mean=0, std=1), images, labels, Recipe(epochs=1))


def test_depth_must_fit_the_blocks() -> None:
    with pytest.raises(ValueError, match="depth must be 6 n"):
        ResNet(18, 10)


@pytest.mark.parametrize("name", SHIFTS)
def test_shifts_of_the_demo_change_the_image(name: str) -> None:
    images = (255 * torch.rand(6, 1, 32, 32, generator=torch.Generator().manual_seed(0))).byte()
    shifted = SHIFTS[name](images, torch.arange(6))
    assert float((shifted.float() - images.float()).abs().mean()) > 5
