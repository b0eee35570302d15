"""`ttac replay`: a stream of labelled images against a running server, whose answers are compared with the truth here.

The stream is that of `ttac evaluate` with the same arguments. Images alone go to the server, as 8-bit levels. Whether a
server that learns beside its answers is as good as the method by itself, two records tell, of a new state folder and at
a rate at which the adapter misses nothing:

    ttac evaluate --model bundle/ --method ttac++ --preset fast --data cifar10 --corruption fog --out here.json
    ttac serve --model bundle/ --method ttac++ --preset fast --state new/
    ttac replay --data cifar10 --corruption fog --rate 30 --out there.json

Both have `error`, `cumulative_error`, `class_error`, `domain_error` and `segments`. They are of one stream where the
settings that both name (`provenance.settings` of the first, `settings` of the second) are the same, but for `batch`,
which orders nothing. Answers come from weights that are a window old, so a stream of a few windows is too short for it.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from ttac.common.environment import environment
from ttac.common.files import read_lines, write_json
from ttac.common.resumable import file_is_there, image_progress, plain_settings, read_json
from ttac.data.streams import Arrival, Stream
from ttac.evaluation.metrics import DomainErrorMeter, ErrorMeter, LatencyMeter
from ttac.evaluation.prepare import stream_settings
from ttac.serving.client import InferenceClient, path_of
from ttac.serving.settings import ReplayJob, read_token

FORMAT = "ttac.replay/1"
STRETCHES = 10  # rows of the table
# What the server says of itself, by its place in /status.
STATUS = {
    "predictor": ("pid", "restarts", "version"),
    "adapter": ("pid", "restarts", "up", "state", "version", "lag"),
}
# What it has counted, since its process or its state folder began.
COUNTS = {
    "predictor": ("requests", "images", "refused"),
    "adapter": ("samples", "refused_samples", "updates", "dropped"),
}


@dataclass(frozen=True)
class RemoteModel:
    """What a server tells of its model: the images that it takes and the classes that it knows."""

    name: str
    channels: int
    size: tuple[int, int]
    num_classes: int
    classes: tuple[str, ...] | None
    crop_pct: float

    @classmethod
    def ask(
        cls, client: InferenceClient, name: str | None = None, classes: tuple[str, ...] | None = None
    ) -> RemoteModel:
        """Ask for the model of that name, or for the only one; `classes` win over the names that the server has."""
        status = client.get("/status")
        served = str(status.get("name"))
        if name not in (None, served):
            raise ValueError(f"{client.url} serves the model {served}, not {name}")
        described = client.get(path_of(served))
        try:
            shapes = {one["name"]: one["shape"] for one in (*described["inputs"], *described["outputs"])}
            _, channels, height, width = (int(length) for length in shapes["images"])
            num_classes = int(shapes["probabilities"][1])
            names = status["classes"] if status.get("named", True) else None  # else they are numbers
            crop_pct = float(status.get("crop_pct") or 1.0)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ValueError(f"{client.url} does not describe its model as ttac serve does ({error!r})") from error
        if classes is not None and len(classes) != num_classes:
            raise ValueError(f"there are {len(classes)} class names for {num_classes} classes")
        known = classes or (tuple(map(str, names)) if names else None)
        return cls(served, channels, (height, width), num_classes, known, crop_pct)


@dataclass
class Replay:
    """What has been answered so far."""

    errors: ErrorMeter
    domain_errors: DomainErrorMeter
    latency: LatencyMeter = field(default_factory=LatencyMeter)
    wrong: list[bool] = field(default_factory=list)  # by sample
    versions: list[str] = field(default_factory=list)  # by sample
    seconds: float = 0.0
    resent: int = 0  # requests whose answer was lost
    refused: int = 0  # answers 429 and 503

    def note(self, arrival: Arrival, labels: torch.Tensor, version: str, seconds: float) -> None:
        """Compare an answer with the truth."""
        self.errors.update(labels, arrival.labels)
        self.domain_errors.update(labels, arrival.labels, arrival.domains)
        self.latency.update(seconds)
        self.wrong += (labels != arrival.labels).tolist()
        self.versions += len(labels) * [version]

    def version_changes(self) -> list[tuple[int, str]]:
        """Give the samples before each change of the version, and the version after it.

        >>> seen = Replay(ErrorMeter(2), DomainErrorMeter((), ()), versions=["1", "1", "2"])
        >>> seen.version_changes()
        [(0, '1'), (2, '2')]
        """
        pairs = zip([None, *self.versions], self.versions)  # noqa: B905 - the last version is followed by none
        return [(place, version) for place, (before, version) in enumerate(pairs) if version != before]

    def stretches(self) -> list[tuple[int, float, float, str]]:
        """Give samples so far, error in the stretch and so far, and the version at its end, of each tenth."""
        wrong, found = 100 * np.array(self.wrong), []
        for part in np.array_split(np.arange(len(wrong)), min(STRETCHES, len(wrong))):
            end = int(part[-1]) + 1
            found.append((end, float(wrong[part].mean()), float(wrong[:end].mean()), self.versions[end - 1]))
        return found


def run_replay(job: ReplayJob, console: Console) -> None:
    """Do the job, unless its record is there."""

    def note(text: str) -> None:
        console.print(text, markup=False)

    with InferenceClient(job.url, token=read_token(job.token_file), patience=job.patience, note=note) as client:
        classes = None if job.classes is None else read_lines(job.classes)
        model = RemoteModel.ask(client, job.name, classes)
        stream = job.stream.build(model)
        shape = (model.channels, *model.size)
        if stream.image_shape != shape:
            said = [" x ".join(map(str, one)) for one in (stream.image_shape, shape)]
            raise ValueError(f"the images are {said[0]}, and the server takes {said[1]}: choose other data")
        # What was asked of the server, the stream as `ttac evaluate` names it; the answers depend on its past too.
        own = {"url": job.url, "served": dataclasses.asdict(model), "rate": job.rate}
        settings = plain_settings({**own, **stream_settings(stream, model.classes)})
        out = job.out
        if out is not None and file_is_there(out, settings, lambda: dict(read_json(out, FORMAT)["settings"])):
            note(f"{out} is there: nothing to do")
            return
        before = client.get("/status")
        found = _send(job, client, model, stream, console)
        record = _record(job, stream, settings, found, server_between(before, client.get("/status")))
    _show(record, found, job, console)
    if job.out is not None:
        write_json(job.out, record)
        note(f"{job.out}: {record['error']:.2f} % error of {record['samples']} samples")


def _send(job: ReplayJob, client: InferenceClient, model: RemoteModel, stream: Stream, console: Console) -> Replay:
    """Send the stream in its order, one request after another's answer."""
    found = Replay(ErrorMeter(model.num_classes), DomainErrorMeter(stream.domains, stream.segments))
    with image_progress(console, "{task.fields[error]:.2f} % error, version {task.fields[version]}") as progress:
        task = progress.add_task(f"{model.name} at {client.url}", total=len(stream), error=0.0, version="-")
        resent, refused, started = client.resent, client.refused, time.monotonic()
        for arrival in stream:
            due = time.monotonic()
            if job.rate is not None:
                # A request that waits for the answer to the last one is late, and its wait counts.
                due = started + len(found.wrong) / job.rate
                time.sleep(max(0.0, due - time.monotonic()))
            # The stream made pixels of levels by a division, so this gives the levels back exactly.
            levels = (255 * arrival.images).round().byte()
            answer = client.infer(model.name, levels.numpy(), ("labels",))
            labels = torch.from_numpy(answer.outputs["labels"].astype(np.int64))
            found.note(arrival, labels, answer.version, time.monotonic() - due)
            progress.update(task, completed=len(found.wrong), error=found.errors.compute(), version=answer.version)
        found.seconds = time.monotonic() - started
        found.resent, found.refused = client.resent - resent, client.refused - refused
    return found


def server_between(before: dict[str, Any], after: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Give what each process says of itself, and what it has counted between two looks at /status.

    A count of a process that was started again is not known, and is None: it went back, or began anew.
    """
    found: dict[str, dict[str, Any]] = {}
    for part, names in STATUS.items():
        earlier, later = before.get(part) or {}, after.get(part) or {}
        same = all(earlier.get(name) == later.get(name) for name in ("pid", "restarts"))
        counted = {name: (earlier.get(name), later.get(name)) for name in COUNTS[part]}
        found[part] = {name: later.get(name) for name in names} | {
            name: last - first if same and first is not None and last is not None else None
            for name, (first, last) in counted.items()
        }
    return found


def _record(
    job: ReplayJob, stream: Stream, settings: dict[str, Any], found: Replay, server: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "settings": settings,
        "samples": len(found.wrong),
        "error": found.errors.compute(),
        "cumulative_error": found.errors.curve,
        "class_error": found.errors.by_class(),
        "domain_error": found.domain_errors.by_domain(),
        "segments": found.domain_errors.by_segment(),
        "versions": found.version_changes(),  # samples before, version
        "latency_ms": found.latency.compute(),  # of requests, with all that they waited
        "latency_from": "sending" if job.rate is None else "when it was due",
        "seconds": found.seconds,
        "rate": job.rate,
        "resent": found.resent,
        "refused": found.refused,
        "server": server,  # counts: during the stream
        "data": job.stream.data,
        "stream": stream.describe(),
        "url": job.url,
        "environment": environment(),
    }


def _show(record: dict[str, Any], found: Replay, job: ReplayJob, console: Console) -> None:
    table = Table("samples", "error here (%)", "error so far (%)", "version", title="error over the stream")
    for samples, here, so_far, version in found.stretches():
        table.add_row(str(samples), f"{here:.2f}", f"{so_far:.2f}", version)
    console.print(table)
    latency, predictor, adapter = record["latency_ms"], record["server"]["predictor"], record["server"]["adapter"]
    asked = "" if job.rate is None else f" of {job.rate:g} asked for"
    for line in (
        f"{len(found.wrong) / found.seconds:.1f} images a second{asked}, in requests of {job.stream.batch}",
        f"a request took {latency['p50']:.1f} ms (p50), {latency['p99']:.1f} ms (p99), {latency['max']:.0f} ms at most"
        f", from {record['latency_from']}",
        f"{len(dict.fromkeys(found.versions))} versions answered, the last is {found.versions[-1]}",
        f"sent again: {record['resent']}, refused for a while: {record['refused']}",
        f"of the server meanwhile: {_known(predictor['images'])} images answered, "
        f"{_known(predictor['refused'])} requests refused",
        f"of its adapter: {_known(adapter['dropped'])} samples missed, {_known(adapter['refused_samples'])} refused by "
        f"the guard, {_known(adapter['lag'])} waiting",
        f"{record['error']:.2f} % error of {record['samples']} samples",
    ):
        console.print(line, markup=False)


def _known(count: int | None) -> str:
    return "unknown" if count is None else str(count)
