"""The only loop over a stream; it alone holds labels."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from ttac.inputs import check_labels
from ttac.methods.base import Adapter
from ttac.metrics import ErrorMeter, LatencyMeter, PeakMemory
from ttac.protocols import Protocol, ProtocolError, get_protocol
from ttac.report.records import Record, environment

Kept = TypeVar("Kept")


@dataclass(frozen=True)
class Outcome:
    """What one arrival batch led to."""

    logits: Tensor  # [N, K]
    predict_seconds: float
    update_seconds: list[float]  # of each update that the batch triggered
    samples: int  # of the stream so far
    error: float | None = None  # so far, where labels are known


class Run:
    """Walks a stream once, in order, and measures; what is beside the images never reaches the adapter."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.seconds = 0.0
        self.samples = 0
        self.batch_sizes: set[int] = set()
        self._already_seen = adapter.samples_seen
        self._latency = {"predict": LatencyMeter(), "update": LatencyMeter()}
        self._memory = PeakMemory(adapter.classifier.mean.device)

    def walk(self, stream: Iterable[tuple[Tensor, Kept]]) -> Iterator[tuple[Outcome, Kept]]:
        """Give each batch's images to the adapter and yield the outcome with what came beside them."""
        for images, kept in stream:
            started = time.perf_counter()
            logits = self.adapter(images)
            self.seconds += time.perf_counter() - started
            self.samples += len(logits)
            self.batch_sizes.add(len(logits))
            step = self.adapter.last_step
            if step.predict_seconds:  # a method that predicts during its update has no time of its own for it
                self._latency["predict"].update(step.predict_seconds)
            for seconds in step.update_seconds:
                self._latency["update"].update(seconds)
            yield Outcome(logits, step.predict_seconds, step.update_seconds, self.samples), kept

    def record(self, *, errors: ErrorMeter | None, protocol: Protocol | None, notes: dict[str, Any]) -> Record:
        """Sum the run up."""
        adapter = self.adapter
        options = dataclasses.asdict(adapter.options)
        stats = adapter.stats
        return Record(
            samples=self.samples,
            error=errors.compute() if errors else None,
            cumulative_error=errors.curve if errors else [],
            class_error=errors.by_class() if errors else [],
            latency_ms={name: meter.compute() for name, meter in self._latency.items()},
            seconds=self.seconds,
            peak_memory_mib=self._memory.compute(),
            adapter_memory_mib=adapter.memory_bytes() / 2**20,
            counters=adapter.counters(),
            provenance={
                "method": adapter.name,
                "options": options,
                "predict": options.get("predict", "-"),
                "protocol": protocol.name if protocol else None,
                "model": adapter.source_fingerprint,
                "statistics": None
                if stats is None
                else {
                    **{k: v for k, v in dataclasses.asdict(stats.origin).items() if k != "counts"},
                    "class_family": stats.classes.covariance.family,
                    "overall_family": stats.overall.covariance.family,
                },
                "samples_before": self._already_seen,
                "reset": "none: the adapter went on from an earlier stream" if self._already_seen else "fresh",
                "arrival_batch_sizes": sorted(self.batch_sizes),
                "device": str(adapter.classifier.mean.device),
                **environment(),
                **notes,
            },
        )


def check_protocol(adapter: Adapter, protocol: Protocol) -> None:
    """Raise an error where the adapter needs more than the protocol allows, before anything runs."""
    title = adapter.capabilities.title
    if protocol.passes == "multi" or protocol.modified_objective:
        raise ProtocolError(f"{protocol.name}: this version evaluates the one-pass protocols N-O-SF and N-O-SL")
    if protocol.name not in adapter.capabilities.protocols:
        allowed = ", ".join(adapter.capabilities.protocols)
        raise ProtocolError(f"{title} is not defined under {protocol.name}; it runs under {allowed}")
    if protocol.source == "free" and adapter.stats is not None and not adapter.stats.source_free:
        raise ProtocolError(
            f"{protocol.name} is source-free, and this {title} holds statistics collected from "
            f"{adapter.stats.origin.samples} source samples: use SourceStatistics.infer, or the protocol N-O-SL"
        )


def evaluate(
    adapter: Adapter,
    stream: Iterable[tuple[Tensor, Tensor]],
    protocol: str | Protocol = "N-O-SL",
    *,
    continuing: bool = False,
    progress: Callable[[Outcome], None] | None = None,
    **notes: Any,
) -> Record:
    """Walk a stream of (images, labels) under a protocol and return its record; `notes` go into the provenance.

    An adapter that has seen samples is refused, as a second pass over a stream would not be one-pass any more; with
    `continuing=True` it goes on from what it has learned, and the record says so.

    >>> import torch
    >>> from ttac.classifier import Classifier
    >>> from ttac.methods.registry import adapt
    >>> clf = Classifier(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2)))
    >>> stream = [(torch.rand(4, 3, 2, 2), torch.tensor([0, 1, 0, 1]))]
    >>> evaluate(adapt(clf, "test"), stream, protocol="N-O-SF").samples
    4
    """
    protocol = get_protocol(protocol)
    check_protocol(adapter, protocol)
    if adapter.samples_seen and not continuing:
        raise ProtocolError(
            f"this adapter has already seen {adapter.samples_seen} samples: call adapter.reset(), "
            "or say continuing=True for a new stream that follows the old one"
        )
    classes = adapter.classifier.num_classes
    errors = ErrorMeter(classes)
    run = Run(adapter)
    for outcome, labels in run.walk(_labelled(stream, classes)):
        errors.update(outcome.logits.argmax(1), labels)
        if progress is not None:
            progress(dataclasses.replace(outcome, error=errors.compute()))
    if not run.samples:
        raise ValueError("the stream is empty")
    return run.record(errors=errors, protocol=protocol, notes=notes)


def _labelled(stream: Iterable[Any], classes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Check labels before their images reach the adapter, so that a bad batch changes nothing."""
    for item in stream:
        if not (isinstance(item, tuple | list) and len(item) == 2):
            raise TypeError(f"the stream yields {type(item).__name__}; expected (images, labels)")
        images, labels = item
        yield images, check_labels(labels, len(images), classes)
