"""The only loop over a stream; it alone holds labels."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from rich.console import Console
from torch import Tensor

from ttac.adaptation.adapter import Adapter, Step
from ttac.common.environment import environment
from ttac.common.resumable import image_progress
from ttac.data.streams import Arrival, Stream
from ttac.evaluation.loggers import Callback, Callbacks
from ttac.evaluation.metrics import DomainErrorMeter, ErrorMeter, LatencyMeter, PeakMemory
from ttac.evaluation.protocols import Protocol, ProtocolError, check_epochs, check_protocol, get_protocol
from ttac.evaluation.records import Record
from ttac.model.inputs import check_labels
from ttac.model.pixel_check import warn_of_pixels

Kept = TypeVar("Kept")
# Closed where a walk ends, however it ends: a stream that reads ahead stops then, and not when an error is forgotten.
_Batches = Generator[tuple[Tensor, Kept], None, None]


@dataclass(frozen=True)
class Outcome:
    """What one arrival batch led to."""

    logits: Tensor  # [N, K]
    predict_seconds: float
    update_seconds: list[float]  # of each update that the batch triggered
    samples: int  # of the stream so far
    losses: Mapping[str, float]  # of the last steps that the batch triggered, weighted
    measures: Mapping[str, float]  # what the updates have noticed
    error: float | None = None  # so far, where labels are known


def losses_field(outcome: Outcome) -> dict[str, Any]:
    """Give the losses as a field of a progress display, nothing where the batch led to no update."""
    if not outcome.losses:
        return {}
    return {"losses": ", " + ", ".join(f"{name} {value:.3g}" for name, value in outcome.losses.items())}


@contextmanager
def shown(title: str, total: int | None, console: Console) -> Iterator[Callable[[Outcome], None]]:
    """Draw a progress bar, in a terminal or a notebook, and give what brings it up to an outcome."""
    with image_progress(console, "{task.fields[error]:.2f} % error{task.fields[losses]}") as progress:
        task = progress.add_task(title, total=total, error=0.0, losses="")

        def show(outcome: Outcome) -> None:
            progress.update(task, completed=outcome.samples, error=outcome.error, **losses_field(outcome))

        yield show
        progress.refresh()  # rich leaves the last state out in notebooks


def _finite(values: Mapping[str, Tensor | float]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if math.isfinite(float(value))}


Purpose = Literal["arrive", "learn", "predict"]


class StreamWalk:
    """Walks a stream in order and measures; what is beside the images never reaches the adapter."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.seconds = 0.0
        self.samples = 0  # predicted
        self.walked = 0  # samples of all passes
        self.batch_sizes: set[int] = set()
        self._already_seen = adapter.samples_seen
        self._pixels_checked = adapter.samples_seen > 0
        self._latency = {"predict": LatencyMeter(), "update": LatencyMeter()}
        self._memory = PeakMemory(adapter.classifier.device)
        self._losses: list[tuple[int, dict[str, float]]] = []
        self._measures: list[tuple[int, dict[str, float]]] = []

    def walk(
        self,
        stream: Iterable[tuple[Tensor, Kept]],
        purpose: Purpose = "arrive",
        *,
        ends: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[Outcome, Kept]]:
        """Give each batch's images to the adapter and yield the outcome with what came beside them.

        `ends` tells whether the stream ends with the batch at hand, so that what it leaves of a window is learned from.
        Benchmarks do not ask for that: their streams are cut anywhere, and records of full windows can be compared.
        """
        for images, kept in stream:
            if not self._pixels_checked:
                warn_of_pixels(self.adapter.classifier, images)
                self._pixels_checked = True
            started = time.perf_counter()
            logits = self._give(images, purpose, ends())
            spent = time.perf_counter() - started
            self.seconds += spent
            self.samples += 0 if purpose == "learn" else len(images)
            self.walked += len(images)
            self.batch_sizes.add(len(images))
            step = Step(predict_seconds=spent) if purpose == "predict" else self.adapter.last_step
            if step.predict_seconds:  # a method that predicts during its update has no time of its own for it
                self._latency["predict"].update(step.predict_seconds)
            for seconds in step.update_seconds:
                self._latency["update"].update(seconds)
            losses, measures = _finite(step.losses), _finite(step.measures)
            for curve, values in ((self._losses, losses), (self._measures, measures)):
                if values:
                    curve.append((self.adapter.samples_seen, values))
            yield Outcome(logits, step.predict_seconds, step.update_seconds, self.samples, losses, measures), kept

    def _give(self, images: Tensor, purpose: Purpose, last: bool) -> Tensor:
        if purpose == "predict":
            return self.adapter.predict(images)
        if purpose == "arrive":
            return self.adapter(images, last=True) if last else self.adapter(images)
        self.adapter.learn(images)
        return images.new_empty(0, self.adapter.classifier.num_classes)

    def begin_epoch(self, epoch: int, epochs: int, target: Iterable[Tensor]) -> None:
        """Let the adapter prepare a pass over the target set."""
        started = time.perf_counter()
        self.adapter.begin_epoch(epoch, epochs, target)
        self.seconds += time.perf_counter() - started

    def record(
        self,
        *,
        errors: ErrorMeter | None,
        protocol: Protocol | None,
        notes: Mapping[str, Any],
        domain_errors: DomainErrorMeter | None = None,
    ) -> Record:
        """Sum the run up; a note cannot replace what is known."""
        adapter = self.adapter
        options = dataclasses.asdict(adapter.options)
        known = {kind: {"level": one.level, **one.provenance()} for kind, one in adapter.knowledge.items()}
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
                **notes,
                "method": adapter.name,
                "options": options,
                "predict": options.get("predict", "-"),
                "protocol": protocol.name if protocol else None,
                "model": adapter.source_fingerprint,
                "knowledge": known,
                "samples_before": self._already_seen,
                "reset": "none: the adapter went on from an earlier stream" if self._already_seen else "fresh",
                "arrival_batch_sizes": sorted(self.batch_sizes),
                "device": str(adapter.classifier.device),
                **environment(),
            },
            domain_error=domain_errors.by_domain() if domain_errors else {},
            segments=domain_errors.by_segment() if domain_errors else [],
            losses=self._losses,
            measures=self._measures,
            guard=adapter.guard.summary() if adapter.guard else {},
        )


def evaluate(
    adapter: Adapter,
    stream: Stream | Iterable[tuple[Tensor, Tensor]],
    protocol: str | Protocol = "N-O-SL",
    *,
    epochs: int | None = None,
    continuing: bool = False,
    progress: Callable[[Outcome], None] | bool = False,
    callbacks: Sequence[Callback] = (),
    notes: Mapping[str, Any] | None = None,
) -> Record:
    """Walk a stream of (images, labels) under a protocol and return its record; `notes` go into the provenance too.

    `progress=True` draws a bar, and a function gets each outcome instead; `callbacks` get the curves of the run, are
    closed at its end, and may be those of `ttac.evaluation.loggers`.

    A `ttac.data.streams.Stream` is described in the provenance, and the record has the error of each of its domains. An
    adapter that has seen samples is refused, as a second pass over a stream would not be one-pass any more; with
    `continuing=True` it goes on from what it has learned, and the record says so. Multi-pass protocols learn from the
    images alone for `epochs` passes (3 unless given) over a stream that gives the same batches each time, such as a
    list, and then predict all of them with the model that the last step left.

    >>> import torch
    >>> from ttac.model.classifier import Classifier
    >>> from ttac.methods.registry import adapt
    >>> clf = Classifier(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2)), mean=0, std=1)
    >>> stream = [(torch.rand(4, 3, 2, 2), torch.tensor([0, 1, 0, 1]))]
    >>> evaluate(adapt(clf, "test"), stream, protocol="N-O-SF").samples
    4
    """
    protocol = get_protocol(protocol)
    check_protocol(adapter, protocol)
    if (adapter.samples_seen or adapter.several_passes) and not continuing:
        raise ProtocolError(
            f"this adapter has already seen {adapter.samples_seen} samples: call adapter.reset(), "
            "or say continuing=True for a new stream that follows the old one"
        )
    check_epochs(protocol, epochs)
    errors = ErrorMeter(adapter.classifier.num_classes)
    run = StreamWalk(adapter)
    purpose: Purpose = "arrive"
    domain_errors, total = None, None
    if isinstance(stream, Stream):
        domain_errors, total = DomainErrorMeter(stream.domains, stream.segments), len(stream)
        notes = {**(notes or {}), "stream": stream.describe()}
    with Callbacks(callbacks) as told:
        if protocol.passes == "multi":
            purpose, epochs = "predict", 3 if epochs is None else epochs
            _learn(run, stream, epochs, told)
            notes = {"epochs": epochs, **(notes or {})}
        title = f"{adapter.name} under {protocol.name}"
        showing = nullcontext(progress) if callable(progress) or not progress else shown(title, total, Console())
        with showing as show, closing(_labelled(stream, adapter)) as batches:
            for outcome, truth in run.walk(batches, purpose):
                predictions = outcome.logits.argmax(1)
                errors.update(predictions, truth.labels)
                if domain_errors is not None and truth.domains is not None:
                    domain_errors.update(predictions, truth.labels, truth.domains)
                outcome = dataclasses.replace(outcome, error=errors.compute())
                told.tell(run.walked, outcome)
                if show:
                    show(outcome)
    if not run.samples:
        raise ValueError("the stream is empty")
    return run.record(errors=errors, protocol=protocol, notes=notes or {}, domain_errors=domain_errors)


def _learn(run: StreamWalk, stream: Iterable[Any], epochs: int, told: Callbacks) -> None:
    """Walk the target set `epochs` times; the adapter gets images and never labels."""
    if epochs < 1:
        raise ValueError(f"epochs must be at least 1, not {epochs}")
    if isinstance(stream, Iterator):
        raise TypeError(
            "a multi-pass protocol reads the stream several times, and this iterator can be read once: "
            "pass a Stream, a list or a DataLoader"
        )
    order = _Order()
    for epoch in range(epochs):
        with closing(order.watch(_labelled(stream, run.adapter))) as batches:
            run.begin_epoch(epoch, epochs, (images for images, _ in batches))
        with closing(order.watch(_labelled(stream, run.adapter))) as batches:
            for outcome, _ in run.walk(batches, "learn"):
                told.tell(run.walked, outcome)


class _Order:
    """Makes sure that a stream gives the same batches each time, as methods may know a sample by its place."""

    def __init__(self) -> None:
        self._first: list[tuple[int, float]] = []  # size and sum of each batch

    def watch(self, stream: Iterable[tuple[Tensor, Kept]]) -> _Batches[Kept]:
        """Pass a walk through, and raise an error at the first batch that is not the one of the first walk."""
        for number, (images, kept) in enumerate(stream):
            mark = (len(images), float(images.double().sum()) if isinstance(images, Tensor) else 0.0)
            if number == len(self._first):
                self._first.append(mark)
            elif self._first[number] != mark:
                raise ValueError("the stream came in another order than before: shuffle it once, not on every pass")
            yield images, kept


class _Truth(NamedTuple):
    """What is known of a batch and kept from the adapter."""

    labels: Tensor
    domains: Tensor | None


def _labelled(stream: Iterable[Any], adapter: Adapter) -> _Batches[_Truth]:
    """Check labels before their images reach the adapter, so that a bad batch changes nothing."""
    for item in stream:
        if not (isinstance(item, Arrival) or (isinstance(item, tuple | list) and len(item) == 2)):
            raise TypeError(f"the stream yields {type(item).__name__}; expected (images, labels)")
        images, labels, *domains = item
        labels = check_labels(labels, len(images), adapter.classifier.num_classes)
        yield images, _Truth(labels, domains[0] if domains else None)
