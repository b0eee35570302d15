"""What an adapter takes: over a stream of 100,000 images, of its queue, and with a ResNet-50 (Linux).

    python benchmarks/memory.py [--threads 2] [--out FILE]

TTAC++ with a queue of 4096 follows 8-bit images of 3 x 32 x 32, made as they come and not held, around a network of
three convolutions. A process of its own reads its resident memory after 10,000 and after 100,000: the peak, in which
buffers of some MiB come and go as the views are drawn, and at rest, when the allocator has given back what is free.
Every update walks as many images as a window has, so that 100,000 take a minute; what is held does not depend on that.
An arrival is a window, as each new size of a batch leaves half a MiB in the kernel cache of oneDNN, which has a bound.
"""

from __future__ import annotations

import ctypes
import gc
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch
from table import run
from timing import Row
from torch import Tensor, nn

import ttac
from ttac.adaptation.adapter import Adapter
from ttac.evaluation.metrics import PeakMemory
from ttac.model.networks import ResNet50

EARLY, ALL = 10_000, 100_000
BATCH, QUEUE, CLASSES = 250, 4096, 10
MIB = 2**20
Result = TypeVar("Result")


@dataclass(frozen=True)
class Moment:
    """What there is after some samples."""

    peak: float  # MiB of resident memory, at most so far
    rest: float  # MiB of resident memory without what is free
    parts: dict[str, int]  # bytes
    queue_limit: int  # bytes


def small_network(width: int = 64) -> nn.Module:
    """Three convolutions with batch norms, and a head of `width` features."""
    widths = (3, width // 4, width // 2, width)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))


def arrivals(samples: int) -> Iterator[Tensor]:
    """Make batches of 8-bit images `[BATCH, 3, 32, 32]` in [0, 1]."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(samples // BATCH):
        yield torch.randint(256, (BATCH, 3, 32, 32), generator=generator).float() / 255


def make_adapter(network: nn.Module, window: int) -> Adapter:
    """Make TTAC++ around a network, with statistics of a few images of every class."""
    classifier = ttac.Classifier(network, mean=0, std=1).eval()
    images = next(arrivals(BATCH))[: 4 * CLASSES]
    stats = ttac.SourceStatistics.collect(classifier, [(images, torch.arange(len(images)) % CLASSES)])
    options: dict[str, Any] = {"queue": QUEUE, "passes": 1, "warmup": False}
    return ttac.adapt(classifier, "ttac++", stats=stats, window=window, walk=window, **options)


def at_rest() -> float:
    """Read the MiB of resident memory that are left when the allocator has given back what is free."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / MIB


def follow_stream(threads: int) -> dict[int, Moment]:
    """Adapt to 100,000 images and look at the memory early and at the end."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    adapter = make_adapter(small_network(), window=BATCH)
    peak = PeakMemory(torch.device("cpu"))
    found = {}
    for images in arrivals(ALL):
        adapter(images)
        if adapter.samples_seen in (EARLY, ALL):
            parts, limit = adapter.memory_parts(), adapter.memory_in_use.samples.limit
            found[adapter.samples_seen] = Moment(peak.compute(), at_rest(), parts, limit)
    return found


def hold_resnet50(threads: int) -> dict[str, int]:
    """Count what TTAC++ holds around a ResNet-50 (D = 2048) after an update, which makes the optimiser's state."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    adapter = make_adapter(ResNet50(CLASSES), window=2)
    adapter(next(arrivals(BATCH))[:2])
    return adapter.memory_parts()


def in_own_process(job: Callable[[int], Result], threads: int) -> Result:
    """Run a job where nothing else has left its memory."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(job, threads).result()


def measure(*, threads: int = 2) -> list[Row]:
    """Measure growth over the stream, the queue's compression, and state the size of a large adapter."""
    early, late = in_own_process(follow_stream, threads).values()
    large = in_own_process(hold_resnet50, threads)
    most = max(late.parts[name] - early.parts.get(name, 0) for name in late.parts)
    peak, rest = (f"{size:.0f} MiB after {EARLY:,}" for size in (early.peak, early.rest))
    peak += f"; the {ALL - EARLY:,} images between are {(ALL - EARLY) * 3 * 32 * 32 / MIB:.0f} MiB in 8 bits"
    held = f"of {len(late.parts)} parts, together {sum(late.parts.values()):,} bytes"
    queue = f"{QUEUE} images: {late.parts['memory'] / MIB:.1f} MiB against {late.queue_limit / MIB:.1f} as float32"
    sizes = ", ".join(f"{name} {size / MIB:.0f}" for name, size in large.items() if size > MIB)
    return [
        Row("memory at rest, growth over 90,000 samples", late.rest - early.rest, "MiB", ("at most", 1), rest),
        Row("peak memory, growth over 90,000 samples", late.peak - early.peak, "MiB", ("at most", 16), peak),
        Row("largest growth of a part of the adapter", most / MIB, "MiB", ("at most", 0), held),
        Row("queue as float32 over 8-bit", late.queue_limit / late.parts["memory"], "x", ("at least", 3.9), queue),
        Row("TTAC++ around ResNet-50, D = 2048, K = 10", sum(large.values()) / MIB, "MiB", None, sizes),
    ]


if __name__ == "__main__":
    run(measure)
