"""How long runs will take: as long as those of the same kind took, or as many forward passes as a method makes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any

import torch

from ttac.benchmark.experiment import Experiment
from ttac.benchmark.runs import Run
from ttac.data.corruptions.constants import SMALL
from ttac.data.sets.specs import SPECS
from ttac.evaluation.records import Record
from ttac.methods.registry import methods
from ttac.model.architectures import new_network

# Forward passes that the time of one sample is worth, with one pass over its window: ResNet-20 at 32 x 32 on one core.
# A backward pass counts as two.
FORWARDS = {
    "test": 1.0, "bn": 2.0, "tent": 2.5, "t3a": 2.2, "conjugate": 3.5, "shot": 5.5, "self-training": 6.0,
    "ttac": 5.0, "ttac+shot": 5.0, "ttt++": 5.0, "ttt-r": 8.0, "ttac++": 10.0, "adacontrast": 10.0,
}  # fmt: skip
OF_A_NEW_METHOD = 10.0
PROBE = 16  # images


class Estimator:
    """Seconds of a run, from records that are there; without any, from how long the network takes for a few images."""

    def __init__(self, records: Iterable[tuple[Run, Record]], forward_seconds: Callable[[str], float]) -> None:
        """Take runs with their records, and what gives the seconds of one image's forward pass by source."""
        self._forward_seconds = forward_seconds
        self._known: dict[tuple[Any, ...], list[float]] = {}
        for run, record in records:
            self._known.setdefault(_kind(run), []).append(record.seconds / record.samples)

    def seconds(self, run: Run, samples: int) -> float:
        """Estimate the time of a run on a stream of some samples."""
        known = self._known.get(_kind(run))
        if known is not None:
            return samples * median(known)
        return samples * forwards(run, samples) * self._forward_seconds(run.source)


def _kind(run: Run) -> tuple[Any, ...]:
    return (run.method, run.protocol, run.source, run.epochs, run.preset, repr(sorted(run.options.items())))


def forwards(run: Run, samples: int) -> float:
    """Count the forward passes that the time of one sample of a run is worth.

    >>> run = Run("", "", "", "", "bn", "N-O-SF", "plain", "digits", None, None, 0, options={"queue": 0, "passes": 1})
    >>> forwards(run, 1000)
    2.0
    """
    known = methods()[run.method]
    options: Mapping[str, Any] = {**known.presets.get(run.preset or "", {}), **run.options}
    made = vars(known.options_type(**options))
    window, passes = made.get("window", 1), made.get("passes", 1)
    # An update walks the queue, which fills as the stream goes on.
    queue = max(min(made.get("queue", 0), made.get("walk", 0) or samples, samples / 2), window)
    learning = FORWARDS.get(run.method, OF_A_NEW_METHOD) - 1
    return 1 + learning * passes * queue / window * (1 if run.epochs is None else run.epochs)


class ForwardTimes:
    """Seconds of one image's forward pass, measured once for each network."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._known: dict[str, float] = {}

    def __call__(self, source: str) -> float:
        """Give the seconds for a source's network."""
        spec = self._experiment.sources[source]
        if spec.arch is None:
            assert spec.init is not None
            return self(spec.init)
        if source not in self._known:
            data = SPECS.get(spec.data)
            channels, size = (3, None) if data is None else (data.channels, data.size)
            size = size if spec.size is None else (spec.size, spec.size)
            self._known[source] = _time_forward(spec.arch, spec.arch_options, channels, size)
        return self._known[source]


def _time_forward(arch: str, arch_options: Mapping[str, int], channels: int, size: tuple[int, int] | None) -> float:
    """Measure the seconds of one image's forward pass through an untrained network."""
    network = new_network(arch, 10, channels=channels, options=arch_options).eval()
    images = torch.zeros(PROBE, channels, *(size or (SMALL, SMALL)))
    with torch.no_grad():
        network(images)
        started = time.perf_counter()
        network(images)
    return (time.perf_counter() - started) / PROBE
