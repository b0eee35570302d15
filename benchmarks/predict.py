"""What `predict` costs beyond the bare network, in eval mode on the same images.

python benchmarks/predict.py [--threads 2] [--out FILE]

The bare side normalises pixels too where the classifier does, as its caller would have to.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from table import run
from timing import Row, median_seconds
from torch import Tensor, nn

import ttac
from ttac.source.networks import ResNet, ResNet50

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
MOST = 3.0  # percent
CASES: tuple[tuple[str, Callable[[], nn.Module], int, int], ...] = (  # images at a time, measurements
    ("ResNet-20", lambda: ResNet(20, 10), 1, 300),
    ("ResNet-20", lambda: ResNet(20, 10), 16, 100),
    ("ResNet-20", lambda: ResNet(20, 10), 256, 15),
    ("ResNet-50", lambda: ResNet50(10), 64, 3),
)


def bare_pass(model: nn.Module, images: Tensor, normalised: bool) -> Callable[[], None]:
    """Make the pass that a caller of the network would write."""
    mean, std = (torch.tensor(values).reshape(1, -1, 1, 1) for values in (MEAN, STD))

    @torch.no_grad()
    def job() -> None:
        model((images - mean) / std if normalised else images)

    return job


def measure(*, threads: int = 2) -> list[Row]:
    """Compare `predict` with the bare network, with and without a normalisation of pixels."""
    rows = []
    for name, build, batch, rounds in CASES:
        network, images = build(), torch.rand(batch, 3, 32, 32)
        for normalised in (False, True):
            mean, std = (MEAN, STD) if normalised else (None, None)
            adapter = ttac.adapt(ttac.Classifier(network, mean=mean, std=std), "test")
            adapter.predict(images)  # the first pass verifies the head
            bare = bare_pass(adapter.classifier.model, images, normalised)
            plain, own = median_seconds(bare, lambda: adapter.predict(images), rounds=rounds)  # noqa: B023 - called here
            kind = "normalised" if normalised else "raw"
            note = f"{1000 * own:.2f} against {1000 * plain:.2f} ms"
            title = f"predict beyond the bare {name}, {batch} x 3 x 32 x 32, {kind} pixels"
            rows.append(Row(title, 100 * (own / plain - 1), "%", ("at most", MOST), note))
    return rows


if __name__ == "__main__":
    run(measure)
