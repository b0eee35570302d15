"""What one update costs against a plain forward and backward pass of the same backbone, as ratios in one run.

    python benchmarks/update_cost.py [--depth 20] [--rounds 7] [--out FILE]

Both sides take turns, so that a busy machine slows them alike; the medians are compared. "views" counts the images that
the network has to see for the update: one weak view a sample, and for TTAC++ one strong view as well.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from jsonargparse import auto_cli
from timing import median_seconds

import ttac
from ttac.files import write_json
from ttac.methods.base import Adapter
from ttac.report.records import environment
from ttac.source.networks import ResNet


def main(depth: int = 20, window: int = 256, rounds: int = 7, threads: int = 2, out: Path | None = None) -> None:
    """Compare updates of TTAC and TTAC++ with forward + backward.

    Args:
        depth: of the residual network at 32 x 32.
        window: images an update.
        rounds: measurements of each side.
        threads: of torch.
        out: JSON file for the outcome.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    network = ResNet(depth, 10).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    classifier = ttac.Classifier(network).eval()
    images, labels = torch.rand(window, 3, 32, 32), torch.arange(window) % 10
    stats = ttac.SourceStatistics.collect(classifier, [(images, labels)])
    plain = classifier.copy()

    def forward_backward(count: int) -> Callable[[], None]:
        views = torch.rand(count, 3, 32, 32)

        def job() -> None:
            plain.train()
            plain.zero_grad()
            torch.nn.functional.cross_entropy(plain(views), torch.arange(count) % 10).backward()

        return job

    rows = {}
    for method, views in (("ttac", 1), ("ttac++", 2)):
        adapter = ttac.adapt(
            classifier,
            method,
            stats=stats,
            window=window,
            queue=0,
            passes=1,
            warmup=False,
            predict="before",
            tau_pp=0.0,
        )
        updates: list[float] = []

        def update(adapter: Adapter = adapter, updates: list[float] = updates) -> None:
            adapter(images)
            updates.extend(adapter.last_step.update_seconds)

        same_images, same_views, _ = median_seconds(
            forward_backward(window), forward_backward(views * window), update, rounds=rounds
        )
        cost = statistics.median(updates[1:])
        rows[method] = {
            "update_ms": 1000 * cost,
            "ratio_to_same_views": cost / same_views,
            "ratio_to_same_images": cost / same_images,
        }
        print(
            f"{method:7} one update of {window}: {1000 * cost:6.0f} ms = {cost / same_views:.2f} x forward + backward "
            f"of its {views * window} views, {cost / same_images:.2f} x of its {window} images"
        )
    if out is not None:
        write_json(out, {"network": f"ResNet-{depth}", "window": window, "rows": rows, "environment": environment()})


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
