"""What `predict` costs beyond the bare network, in eval mode on the same images.

python benchmarks/predict.py [--threads 2] [--out FILE]

The shortest times of both sides are compared. The bare side normalises pixels too where the classifier does, as its
caller would have to.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from table import run
from timing import Row, least_seconds
from torch import Tensor, nn

import ttac
from ttac.model.networks import ResNet, ResNet50

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
MOST = 3.0  # percent
CASES: tuple[tuple[str, Callable[[], nn.Module], int, int], ...] = (  # images at a time, measurements
    ("ResNet-20", lambda: ResNet(20, 10), 1, 200),
    ("ResNet-20", lambda: ResNet(20, 10), 16, 50),
    ("ResNet-20", lambda: ResNet(20, 10), 256, 10),
    ("ResNet-50", lambda: ResNet50(10), 64, 2),
)


class Nothing(nn.Module):
    """A network that costs nothing, so that what is left of a prediction is `predict` itself."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(1, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(x[:, 0, 0, :1])
        return logits


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
            jobs: list[Callable[[], object]] = []
            for model in (network, Nothing()):
                mean, std = (MEAN, STD) if normalised else (None, None)
                adapter = ttac.adapt(ttac.Classifier(model, mean=mean, std=std), "test")
                adapter.predict(images)  # the first pass verifies the head
                jobs += [bare_pass(adapter.classifier.model, images, normalised), partial(adapter.predict, images)]
            plain, own = least_seconds(*jobs[:2], rounds=rounds)
            nothing, around_nothing = least_seconds(*jobs[2:], rounds=100)
            title = f"{name}, {batch} x 3 x 32 x 32, {'normalised' if normalised else 'raw'} pixels"
            added = around_nothing - nothing
            note = f"{1000 * added:.3f} ms around a network that costs nothing, on {1000 * plain:.2f} ms"
            rows.append(Row(f"work of predict / bare {title}", 100 * added / plain, "%", None, note))
            note = f"{1000 * own:.2f} against {1000 * plain:.2f} ms; noisier than the row above"
            rows.append(Row(f"predict beyond the bare {title}", 100 * (own / plain - 1), "%", ("at most", MOST), note))
    return rows


if __name__ == "__main__":
    run(measure)
