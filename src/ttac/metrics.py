"""Numbers of a run: `update` with what happened, `compute` the number, `reset` to start again."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


class ErrorMeter:
    """Error in percent: of all samples, over the stream, and by class.

    >>> meter = ErrorMeter(num_classes=3)
    >>> meter.update(torch.tensor([0, 1]), torch.tensor([0, 2]))
    >>> meter.compute(), meter.curve, meter.by_class()
    (50.0, [(2, 50.0)], [0.0, None, 100.0])
    """

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._wrong = torch.zeros(self.num_classes, dtype=torch.int64)
        self._total = torch.zeros(self.num_classes, dtype=torch.int64)
        self.curve: list[tuple[int, float]] = []  # (samples so far, error so far)

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
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return peak / (2**20 if sys.platform == "darwin" else 1024)
