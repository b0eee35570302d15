"""`ttac evaluate`: one method on one stream under one protocol makes one record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from ttac.common.files import text_hash
from ttac.common.resumable import file_is_there, image_progress, plain_settings
from ttac.data.corruptions.constants import SEVERITIES
from ttac.data.corruptions.frost import FrostPhotographs
from ttac.data.for_model import TakesImages, read_for
from ttac.data.sets import find_data
from ttac.data.streams import Domain, Scenario, Stream, corrupted_domains
from ttac.evaluation.engine import Outcome, check_protocol, evaluate
from ttac.evaluation.method_choice import MethodChoice
from ttac.evaluation.protocols import get_protocol
from ttac.evaluation.records import Record
from ttac.methods.base import Adapter
from ttac.model.weights import check_size

USUAL_SEVERITY = 5


@dataclass(frozen=True)
class StreamChoice:
    """Labelled images, and what becomes of them on their way to the method."""

    data: str  # see `find_data`
    scenario: Scenario
    split: str = "test"
    corruptions: tuple[str, ...] = ()  # made as the images are read
    domains: tuple[str, ...] = ()  # that the data bring along
    severities: tuple[int, ...] | None = None  # None: 5, or all five in a gradual stream
    frost: Path | None = None  # folder of photographs; None: a procedural texture
    clean: str | None = None  # data of the interludes; None: the images before they are corrupted
    prefetch: int = 2
    some: int | None = None  # images of the data alone, the same ones whatever the seed
    corruption_seed: int | None = None  # None: that of the scenario

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        if self.corruptions and self.domains:
            raise ValueError("images are corrupted as they are read, or come from the files of a domain: not both")
        if self.scenario.interlude and not self.corruptions and self.clean is None:
            raise ValueError("interludes show clean images: name them with --clean")

    def build(self, model: TakesImages) -> Stream:
        """Find the data, and make the stream of them for a model; pixels are read later."""
        found = find_data(self.data)
        read = partial(read_for, model, found, self.split)
        usual = SEVERITIES if self.scenario.sequence == "gradual" else (USUAL_SEVERITY,)
        clean = None if self.clean is None else read_for(model, find_data(self.clean), self.split)
        if self.corruptions:
            original = read().some(self.some)
            clean = clean or original
            photographs = None if self.frost is None else FrostPhotographs.read(self.frost)
            severities = self.severities or usual
            seed = self.scenario.seed if self.corruption_seed is None else self.corruption_seed
            domains = corrupted_domains(original, self.corruptions, severities, seed, photographs)
        else:
            levels = self.severities or (usual if found.layout.severities else (None,))
            title = found.path.name if found.spec is None else found.spec.name
            domains = [
                Domain(name or title, read(domain=name, severity=severity).some(self.some), severity)
                for name in self.domains or (None,)
                for severity in levels
            ]
        return Stream(domains, self.scenario, clean=clean, prefetch=self.prefetch)


@dataclass(frozen=True)
class Measurement:
    """A method on a stream under a protocol."""

    choice: MethodChoice
    stream: StreamChoice
    protocol: str = "N-O-SF"
    epochs: int | None = None  # of multi-pass protocols

    def __post_init__(self) -> None:
        """Refuse epochs of a single pass, before statistics are inferred for it."""
        if self.epochs is not None and get_protocol(self.protocol).passes == "one":
            raise ValueError(f"{self.protocol} reads every sample once: --epochs belongs to the multi-pass protocols")


class Prepared:
    """A measurement whose data are found; nothing has been learned or predicted yet."""

    def __init__(self, measurement: Measurement) -> None:
        self.protocol = get_protocol(measurement.protocol)
        self.choice = dataclasses.replace(measurement.choice, source_free=self.protocol.source == "free").completed()
        self.stream = measurement.stream.build(self.choice.model.description)
        check_size(self.choice.model.classifier, self.stream.image_shape[1:])
        self.settings = _settings(measurement, self.choice, self.stream)
        self._measurement = measurement

    def adapter(self, console: Console) -> Adapter:
        """Make the adapter, or raise an error where the protocol does not allow it."""
        check = partial(check_protocol, protocol=self.protocol)
        adapter = self.choice.adapter(console, lambda: self.choice.infer(console, check))
        check(adapter)
        return adapter

    def measure(
        self, adapter: Adapter, progress: Callable[[Outcome], None], notes: Mapping[str, Any] | None = None
    ) -> Record:
        """Walk the stream; `notes` go into the provenance."""
        known = {"data": self._measurement.stream.data, "settings": self.settings, **(notes or {})}
        epochs = self._measurement.epochs
        return evaluate(adapter, self.stream, self.protocol, epochs=epochs, progress=progress, notes=known)


@dataclass(frozen=True)
class EvaluateJob:
    """What to measure, and where the record goes."""

    measurement: Measurement
    out: Path


def run_evaluate(job: EvaluateJob, console: Console) -> None:
    """Do the job, unless its record is there."""
    prepared = Prepared(job.measurement)
    if file_is_there(job.out, prepared.settings, lambda: dict(Record.load(job.out).provenance["settings"])):
        console.print(f"{job.out} is there: nothing to do", markup=False)
        return
    adapter = prepared.adapter(console)
    title = f"{adapter.name} under {prepared.protocol.name}"
    job.out.parent.mkdir(parents=True, exist_ok=True)  # rather now than after hours
    with image_progress(console, "{task.fields[error]:.2f} % error") as progress:
        task = progress.add_task(title, total=len(prepared.stream), error=0.0)

        def show(outcome: Outcome) -> None:
            progress.update(task, completed=outcome.samples, error=outcome.error)

        record = prepared.measure(adapter, show)
    for domain, found in record.domain_error.items():  # before they are saved, as a disk may be full
        console.print(f"{domain}: {found['error']:.2f} % error of {found['samples']} samples", markup=False)
    record.save(job.out)
    console.print(f"{job.out}: {record.error:.2f} % error of {record.samples} samples, {title}", markup=False)


def _settings(measurement: Measurement, choice: MethodChoice, stream: Stream) -> dict[str, Any]:
    """Name all that the record depends on."""
    return plain_settings(
        {
            **choice.settings(),
            **choice.model.classifier.speed.settings(),
            "protocol": measurement.protocol,
            "epochs": measurement.epochs,
            **stream_settings(stream, choice.model.description.classes),
        }
    )


def stream_settings(stream: Stream, classes: tuple[str, ...] | None) -> dict[str, Any]:
    """Name the stream, and the classes in whose order the labels of a named data set are put."""
    described = stream.describe()
    return {
        **described["scenario"],
        "domains": list(stream.domains),
        "data": text_hash([domain["data"] for domain in described["domains"]]),
        "classes": None if classes is None else text_hash([ascii(name) for name in classes]),
    }
