"""What one update costs against a plain forward and backward pass of the same backbone over as many images."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from timing import Bound, Row, median_seconds
from torch import nn

import ttac
from ttac.model.networks import ResNet, ResNet50

WINDOW = 256
VIEWS = {"ttac": 1.0, "ttac++": 1.25, "ttac++ deep": 1.25}  # images that the network has to see a sample
BOUNDS = {"ResNet-20": 1.25, "ResNet-50": 1.15}


def plain_passes(classifier: ttac.Classifier, views: float) -> Callable[[], None]:
    """Make the other side: forward and backward of a window of the images of `views` windows."""
    plain = classifier.copy().train()
    count = round(views * WINDOW)
    images, labels = torch.rand(count, 3, 32, 32), torch.arange(count) % 10

    def job() -> None:
        plain.zero_grad()
        nn.functional.cross_entropy(plain(images), labels).backward()

    return job


def update_of(classifier: ttac.Classifier, method: str) -> tuple[Callable[[], None], list[float]]:
    """Make updates of one window each, every sample moving its cluster, and the list that their times go into."""
    images, labels = torch.rand(WINDOW, 3, 32, 32), torch.arange(WINDOW) % 10
    stats = ttac.SourceStatistics.collect(classifier, [(images, labels)])
    options: dict[str, Any] = {"queue": 0, "passes": 1, "warmup": False, "predict": "before", "tau_pp": 0.0}
    name, _, preset = method.partition(" ")
    adapter = ttac.adapt(classifier, name, stats=stats, preset=preset or None, window=WINDOW, **options)
    seconds: list[float] = []

    def job() -> None:
        adapter(images)
        seconds.extend(adapter.last_step.update_seconds)

    return job, seconds


def measure(*, threads: int = 2) -> list[Row]:
    """Compare updates of TTAC, TTAC++ and TTAC++ deep with forward + backward."""
    rows = []
    networks: tuple[tuple[str, nn.Module, int], ...] = (
        ("ResNet-20", ResNet(20, 10), 7),
        ("ResNet-50", ResNet50(10), 2),
    )
    for name, network, rounds in networks:
        classifier = ttac.Classifier(network.to(memory_format=torch.channels_last), mean=0, std=1).eval()  # type: ignore[call-overload]
        for method, views in VIEWS.items():
            if name == "ResNet-50" and method != "ttac++":
                continue  # minutes on a CPU for a smaller claim
            update, seconds = update_of(classifier, method)
            plain, _ = median_seconds(plain_passes(classifier, views), update, rounds=rounds)
            taken = statistics.median(seconds[1:])
            bound: Bound | None = ("at most", BOUNDS[name]) if method == "ttac++" else None
            width = f"channels-last, D = {classifier.feature_dim}"
            note = f"{1000 * taken:.0f} ms a window of {WINDOW}, {views:g} view(s) each, {width}"
            rows.append(Row(f"one update of {method} / forward + backward, {name}", taken / plain, "x", bound, note))
    return rows


if __name__ == "__main__":
    from table import run

    run(measure)
