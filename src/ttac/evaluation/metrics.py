"""Numbers of a run: `update` with what happened, `compute` the number, `reset` to start again."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ttac.common.state import Stateful


class ErrorMeter(Stateful):
    """Error in percent: of all samples, over the stream, and by class.

    >>> meter = ErrorMeter(num_classes=3)
    >>> meter.update(torch.tensor([0, 1]), torch.tensor([0, 2]))
    >>> meter.compute(), meter.curve, meter.by_class()
    (50.0, [(2, 50.0)], [0.0, None, 100.0])
    """

    _wrong: Tensor
    _total: Tensor
    curve: list[tuple[int, float]]  # (samples so far, error so far)

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.declare(
            _wrong=lambda: torch.zeros(num_classes, dtype=torch.int64),
            _total=lambda: torch.zeros(num_classes, dtype=torch.int64),
            curve=list,
        )

    def reset(self) -> None:
        """Forget everything."""
        self.reset_state()

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Count one batch of predicted and true labels `[N]`."""
        labels = labels.cpu()
        missed = labels[predictions.cpu() != labels]
        self._total += torch.bincount(labels, minlength=self.num_classes)
        self._wrong += torch.bincount(missed, minlength=self.num_classes)
        self.curve.append((int(self._total.sum()), self.compute()))

    def compute(self) -> float:
        """Give the error of all samples so far."""
        return 100 * int(self._wrong.sum()) / max(int(self._total.sum()), 1)

    def by_class(self) -> list[float | None]:
        """Give the error of each class, None where none of its samples came."""
        pairs = zip(self._wrong.tolist(), self._total.tolist(), strict=True)
        return [100 * wrong / total if total else None for wrong, total in pairs]


class DomainErrorMeter:
    """Error in percent of each domain of a stream, and of each segment that follows another.

    >>> meter = DomainErrorMeter(("fog", "snow"), [("fog", 1), ("snow", 2)])
    >>> meter.update(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0]), torch.tensor([0, 1, 1]))
    >>> meter.by_domain()
    {'fog': {'samples': 1, 'error': 0.0}, 'snow': {'samples': 2, 'error': 50.0}}
    >>> meter.by_segment()
    [('fog', 1, 0.0), ('snow', 2, 50.0)]
    """

    def __init__(self, domains: Sequence[str], segments: Sequence[tuple[str, int]]) -> None:
        self.domains, self.segments = domains, segments
        self._ends = torch.tensor([samples for _, samples in segments]).cumsum(0)
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._seen = 0
        self._order: dict[int, None] = {}  # domains as they first came
        self._by_domain = torch.zeros(2, len(self.domains), dtype=torch.int64)  # wrong, total
        self._by_segment = torch.zeros(2, len(self.segments), dtype=torch.int64)

    def update(self, predictions: Tensor, labels: Tensor, domains: Tensor) -> None:
        """Count one batch of predicted and true labels `[N]` and the numbers of their domains `[N]`."""
        wrong = predictions.cpu() != labels.cpu()
        places = torch.arange(self._seen, self._seen + len(wrong))
        self._seen += len(wrong)
        self._order |= dict.fromkeys(domains.tolist())
        segments = torch.searchsorted(self._ends, places, right=True)
        for counts, numbers in ((self._by_domain, domains), (self._by_segment, segments)):
            counts[0] += torch.bincount(numbers[wrong], minlength=counts.shape[1])
            counts[1] += torch.bincount(numbers, minlength=counts.shape[1])

    def by_domain(self) -> dict[str, dict[str, float]]:
        """Give samples and error of each domain, in the order in which they first came."""
        counts = {number: self._by_domain[:, number].tolist() for number in self._order}
        return {
            self.domains[number]: {"samples": total, "error": 100 * wrong / total}
            for number, (wrong, total) in counts.items()
        }

    def by_segment(self) -> list[tuple[str, int, float]]:
        """Give name, samples and error of each segment that has come."""
        counts = zip(self.segments, *self._by_segment.tolist(), strict=True)
        return [(name, total, 100 * wrong / total) for (name, _), wrong, total in counts if total]


class LatencyMeter:
    """Percentiles of durations, in milliseconds.

    >>> meter = LatencyMeter()
    >>> meter.update(0.002)
    >>> meter.compute()
    {'count': 1, 'mean': 2.0, 'p50': 2.0, 'p90': 2.0, 'p99': 2.0, 'max': 2.0}
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._seconds: list[float] = []

    def update(self, seconds: float) -> None:
        """Add one duration."""
        self._seconds.append(seconds)

    def compute(self) -> dict[str, float]:
        """Give count, mean, percentiles and maximum; only the count where nothing was timed."""
        if not self._seconds:
            return {"count": 0}
        times = 1000 * np.asarray(self._seconds)
        numbers = {f"p{share}": float(np.percentile(times, share)) for share in (50, 90, 99)}
        return {"count": len(times), "mean": float(times.mean()), **numbers, "max": float(times.max())}


class PeakMemory:
    """The most memory that the process (or the GPU) has held since the last reset, in MiB.

    >>> PeakMemory(torch.device("cpu")).compute() > 0
    True
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.reset()

    def reset(self) -> None:
        """Start counting anew, where the system can; elsewhere the process's whole life counts."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the high-water mark
        except OSError:
            return

    def compute(self) -> float:
        """Give the peak so far."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**20
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
        except (OSError, StopIteration):
            return _peak_elsewhere()


def _peak_elsewhere() -> float:
    """Give the most memory that the process has ever held, where there is no /proc, in MiB."""
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        return float(psutil.Process().memory_info().peak_wset) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 1024)
