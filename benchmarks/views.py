"""What weak and strong views cost against ResNet-20's forward and backward pass over them, and at 224 x 224.

python benchmarks/views.py [--threads 2] [--out FILE]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from table import run
from timing import Row, median_seconds
from torch import Tensor, nn

from ttac.model.networks import ResNet
from ttac.model.views import strong_view, weak_view

WINDOW, LARGE_WINDOW = 256, 16
LAYOUTS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}


def views_of(images: Tensor) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Make the jobs of the weak and of the strong view, with new draws each time."""
    generator = torch.Generator().manual_seed(0)
    return lambda: weak_view(images, generator, flip=True, crop=False), lambda: strong_view(
        images, generator, flip=True
    )


def passes_over(views: tuple[Tensor, ...], layout: torch.memory_format) -> Callable[[], None]:
    """Make ResNet-20's forward and backward passes, one view at a time, which is faster than both at once."""
    network = ResNet(20, 10).to(memory_format=layout)  # type: ignore[call-overload]
    labels = torch.arange(len(views[0])) % 10

    def job() -> None:
        network.zero_grad()
        for view in views:
            nn.functional.cross_entropy(network(view), labels).backward()

    return job


def measure(*, threads: int = 2) -> list[Row]:
    """Compare the views at 32 x 32 with the faster of the network's layouts, and state their time at 224 x 224."""
    jobs = views_of(torch.rand(WINDOW, 3, 32, 32))
    views = tuple(job() for job in jobs)
    passes = (passes_over(views, layout) for layout in LAYOUTS.values())
    weak, strong, *plain = median_seconds(*jobs, *passes, rounds=3)
    fastest, layout = min(zip(plain, LAYOUTS, strict=True))
    cost = f"{1000 * weak:.1f} + {1000 * strong:.1f} ms against {1000 * fastest:.0f} ms, weights {layout}"
    large_weak, large_strong = median_seconds(*views_of(torch.rand(LARGE_WINDOW, 3, 224, 224)), rounds=5)
    large_cost = f"{1000 * large_weak:.1f} + {1000 * large_strong:.1f} ms"
    name = f"weak and strong views of {WINDOW} x 3 x 32 x 32 / forward + backward of ResNet-20 on them"
    large_name = f"weak and strong views of {LARGE_WINDOW} x 3 x 224 x 224"
    return [
        Row(name, 100 * (weak + strong) / fastest, "%", ("at most", 10), cost),
        Row(large_name, large_weak + large_strong, "s", None, large_cost),
    ]


if __name__ == "__main__":
    run(measure)
