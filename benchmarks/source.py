"""How long inferring anchors from a head takes, and what collecting statistics adds to the forward pass.

    python benchmarks/source.py [--threads 2] [--out FILE]

Collection is timed with networks that give their pixels as features, so that nothing but the collection is in the time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from table import run
from timing import Row, median_seconds
from torch import Tensor, nn

from ttac import Classifier, SourceStatistics
from ttac.model.networks import ResNet, ResNet50
from ttac.source.buffered import PORTION
from ttac.source.infer import Parameterisation

BATCH = 256
CLASSES, WIDTH = 1000, 2048


def like_trained(classes: int, width: int) -> Tensor:
    """Make a head's weights `[classes, width]`: rows of norm 1 to 2, classes that resemble others of their group."""
    generator = torch.Generator().manual_seed(0)
    group = torch.randn(classes // 20, width, generator=generator)[torch.arange(classes) % (classes // 20)]
    rows = group + torch.randn(classes, width, generator=generator) + 0.5 * torch.randn(width, generator=generator)
    return nn.functional.normalize(rows) * (1 + torch.rand(classes, 1, generator=generator))


def inference() -> list[Row]:
    """Time whole inferences, the probe pass and the fingerprint of ResNet-50 included."""
    classifier = Classifier(ResNet50(CLASSES), mean=0, std=1).eval()
    trained = like_trained(CLASSES, WIDTH)
    cases: tuple[tuple[str, Tensor, Parameterisation | None], ...] = (
        ("new head", classifier.head.weight.detach().clone(), None),
        ("trained head", trained, None),
        ("trained head, signed features", trained, "signed"),
        ("trained head, square parameterisation", trained, "square"),
    )
    rows = []
    for name, weight, parameterisation in cases:
        with torch.no_grad():
            classifier.head.weight.copy_(weight)
        started = time.perf_counter()
        SourceStatistics.infer(classifier, parameterisation=parameterisation)
        taken = time.perf_counter() - started
        rows.append(Row(f"inference for K = {CLASSES}, D = {WIDTH}: {name}", taken, "s", ("at most", 20)))
    return rows


def forward(network: nn.Module) -> Callable[[], Tensor]:
    """Make the bare forward pass over one batch of 32 x 32."""
    network = network.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.rand(BATCH, 3, 32, 32)
    return torch.no_grad()(lambda: network(images))


@dataclass(frozen=True)
class Collecting:
    """A collection of features of one width, over as many batches as fill a portion or hold a batch of each class."""

    classes: int
    shape: tuple[int, int, int]  # of the images, whose pixels are the features
    in_order: bool = False  # all samples of a class after each other

    @property
    def batches(self) -> int:
        """How many batches there are."""
        return self.classes if self.in_order else PORTION // (4 * math.prod(self.shape) * BATCH)

    @property
    def name(self) -> str:
        """What the table calls it."""
        order = ", sorted by class, low-rank" if self.in_order else ""
        return f"collection for K = {self.classes}, D = {math.prod(self.shape)}{order}"

    def job(self) -> Callable[[], SourceStatistics]:
        """Make the collection over batches whose features are their pixels."""
        model = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(self.shape), self.classes))
        classifier = Classifier(model, mean=[0.0] * self.shape[0], std=[1.0] * self.shape[0])
        labels = torch.arange(BATCH * self.batches) % self.classes
        labels = labels.sort().values if self.in_order else labels[torch.randperm(len(labels))]
        loader = [(torch.rand(BATCH, *self.shape), own) for own in labels.split(BATCH)]
        family = "low-rank" if self.in_order else None
        return lambda: SourceStatistics.collect(classifier, loader, family=family)


def collecting() -> list[Row]:
    """Compare the collection with the forward pass of the networks that have features of this width."""
    wide = (2, 32, 32)
    cases: tuple[tuple[str, nn.Module, list[Collecting], int], ...] = (
        ("ResNet-20", ResNet(20, 10), [Collecting(10, (1, 8, 8)), Collecting(10, (1, 8, 8), in_order=True)], 5),
        (
            "ResNet-50",
            ResNet50(10),
            [Collecting(10, wide), Collecting(CLASSES, wide), Collecting(40, wide, in_order=True)],
            1,
        ),
    )
    rows = []
    for name, network, collections, rounds in cases:
        jobs = [collection.job() for collection in collections]
        plain, *taken = median_seconds(forward(network), *jobs, rounds=rounds)
        for collection, seconds in zip(collections, taken, strict=True):
            each = seconds / collection.batches
            note = f"{1000 * each:.1f} ms a batch of {BATCH} against {1000 * plain:.0f} ms"
            title = f"{collection.name} / forward of {name} at 32 x 32"
            rows.append(Row(title, 100 * each / plain, "%", ("at most", 10), note))
    return rows


def measure(*, threads: int = 2) -> list[Row]:
    """Measure inference and collection."""
    return inference() + collecting()


if __name__ == "__main__":
    run(measure)
