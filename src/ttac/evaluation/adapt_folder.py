"""`ttac adapt`: stream a folder through an adapter, write what it predicts, and go on after an interruption."""

from __future__ import annotations

import csv
import dataclasses
import io
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console
from torch import Tensor

from ttac.common.files import text_hash
from ttac.common.resumable import (
    PROGRESS,
    StoppedError,
    alone_in,
    image_progress,
    is_complete,
    plain_settings,
    save_progress,
    saved_progress,
    signals_noted,
)
from ttac.data.folder import FolderStream, image_size, list_images
from ttac.evaluation.engine import Outcome, Run
from ttac.evaluation.method_choice import MethodChoice
from ttac.evaluation.records import Record
from ttac.methods.base import Adapter
from ttac.model.weights import check_size, save_model
from ttac.source.statistics import SourceStatistics

PREDICTIONS, WEIGHTS, RECORD = "predictions.csv", "adapted.safetensors", "record.json"
PART, INFERRED = "predictions.csv.part", "inferred.safetensors"


@dataclass(frozen=True)
class AdaptJob:
    """What to adapt, on what, how, and where the results go."""

    choice: MethodChoice
    images: Path
    out: Path
    batch: int = 64
    checkpoint_every: float = 120.0  # seconds


@dataclass
class _Position:
    """How far the job has come, beside what the adapter knows; plain values, so that torch loads them safely."""

    next_batch: int = 0
    csv_bytes: int = 0
    updates: int = 0
    seconds: float = 0.0
    batch_sizes: list[int] = field(default_factory=list)
    unreadable: list[list[str]] = field(default_factory=list)  # file, reason
    continued_at: list[int] = field(default_factory=list)  # samples before each continuation


def run_adapt(job: AdaptJob, console: Console) -> None:
    """Do the job, or the rest of it."""
    files = list_images(job.images)
    job = dataclasses.replace(job, choice=job.choice.completed())
    settings = _settings(job, files)
    if is_complete(job.out, PREDICTIONS, settings, lambda: Record.load(job.out / RECORD).provenance["settings"]):
        console.print(f"{job.out} is complete: nothing to do", markup=False)
        return
    saved = saved_progress(job.out, settings, (WEIGHTS, RECORD), lambda content: _Position(**content["position"]))
    classifier, description = job.choice.model.classifier, job.choice.model.description
    size = description.size or image_size(job.images, files)
    check_size(classifier, size)
    pixels = f"mean {_short(classifier.mean)}, std {_short(classifier.std)}"
    console.print(
        f"{description.arch}: {classifier.num_classes} classes, {size[0]} x {size[1]}, {pixels}", markup=False
    )
    adapter = job.choice.adapter(console, lambda: _inferred(job, saved is not None, console))
    with alone_in(job.out), _opened_to_go_on(job.out / PART) as table:
        _Worker(job, settings, adapter, console, table).run(files, saved)


class _Worker:
    """One process's share of a job."""

    def __init__(
        self, job: AdaptJob, settings: dict[str, Any], adapter: Adapter, console: Console, table: BinaryIO
    ) -> None:
        self.job, self.settings, self.adapter, self.console, self.table = job, settings, adapter, console, table
        self.description = job.choice.model.description
        self.position = _Position()
        self.clock = Run(adapter)  # made before any state is loaded: an interrupted stream is still one stream

    def run(self, files: list[str], saved: dict[str, Any] | None) -> None:
        if saved is not None:
            self._go_on_from(saved)
        self.table.truncate(self.position.csv_bytes)
        self.table.seek(self.position.csv_bytes)
        stream = FolderStream(
            self.job.images,
            files,
            self.job.batch,
            self.description.size,
            self.adapter.classifier.channels,
            self.description.crop_pct,
            self._report_unreadable,
            self.position.next_batch,
        )
        if saved is None:
            self.table.write(_row("file", "label", "confidence"))
            self._checkpoint(stream)
        self._walk(stream)
        if not self.clock.samples:
            raise ValueError(f"none of {len(files)} images could be read")
        self._finish(files)

    def _go_on_from(self, saved: dict[str, Any]) -> None:
        self.adapter.load_state_dict(saved["adapter"])
        self.position = position = _Position(**saved["position"])
        if os.fstat(self.table.fileno()).st_size < position.csv_bytes:
            raise ValueError(f"{self.job.out / PART} has lost lines: delete {self.job.out} and start again")
        self.clock.samples, self.clock.seconds = self.adapter.samples_seen, position.seconds
        self.clock.batch_sizes = set(position.batch_sizes)
        position.continued_at.append(self.clock.samples)
        self.console.print(f"going on after {self.clock.samples} images", markup=False)

    def _walk(self, stream: FolderStream) -> None:
        started = checkpointed = time.monotonic()
        before = self.clock.samples
        note = "{task.fields[rate]:.1f} images/s, {task.fields[updates]} updates"
        with signals_noted(self.console) as noted, image_progress(self.console, note) as progress:
            task = progress.add_task("adapting", total=len(stream.files), rate=0.0, updates=0)
            for outcome, names in self.clock.walk(stream):
                self._write_predictions(names, outcome)
                self.position.updates += len(outcome.update_seconds)
                progress.update(
                    task,
                    completed=min(stream.next_batch * stream.batch, len(stream.files)),
                    rate=(self.clock.samples - before) / (time.monotonic() - started),
                    updates=self.position.updates,
                )
                if noted or time.monotonic() - checkpointed >= self.job.checkpoint_every:
                    self._checkpoint(stream)
                    checkpointed = time.monotonic()
                if noted:
                    raise StoppedError(
                        noted[0], f"stopped after {self.clock.samples} images; the same command goes on from there"
                    )

    def _write_predictions(self, names: list[str], outcome: Outcome) -> None:
        confidence, label = outcome.logits.float().softmax(1).max(1)
        classes = self.description.classes
        for name, number, share in zip(names, label.tolist(), confidence.tolist(), strict=True):
            self.table.write(_row(name, classes[number] if classes else str(number), f"{share:.6f}"))

    def _report_unreadable(self, name: str, reason: str) -> None:
        self.position.unreadable.append([name, reason])
        self.console.print(f"skipped {name!a}: {reason}", markup=False)

    def _checkpoint(self, stream: FolderStream) -> None:
        """Note where the job is; the table is on disk before the note that counts its bytes."""
        self.table.flush()
        os.fsync(self.table.fileno())
        position = self.position
        position.next_batch, position.csv_bytes = stream.next_batch, self.table.tell()
        position.seconds, position.batch_sizes = self.clock.seconds, sorted(self.clock.batch_sizes)
        content = {
            "settings": self.settings,
            "position": dataclasses.asdict(position),
            "adapter": self.adapter.state_dict(),
        }
        save_progress(self.job.out, content)

    def _finish(self, files: list[str]) -> None:
        """Write the results; the predictions take their name last, so their being there means that all is."""
        out, position = self.job.out, self.position
        save_model(out / WEIGHTS, self.adapter.adapted().model, self.description)
        notes = {
            "images": self.job.images.resolve().name,
            "files": len(files),
            "unreadable": position.unreadable,
            "updates": position.updates,
            "continued_at": position.continued_at,  # latencies are of the images after the last one
            "settings": self.settings,
        }
        self.clock.record(errors=None, protocol=None, notes=notes).save(out / RECORD)
        self.table.flush()
        os.fsync(self.table.fileno())
        (out / PART).replace(out / PREDICTIONS)
        (out / PROGRESS).unlink()
        self.console.print(
            f"{out}: {self.clock.samples} images predicted, {position.updates} updates, "
            f"{len(position.unreadable)} unreadable",
            markup=False,
        )


def _settings(job: AdaptJob, files: list[str]) -> dict[str, Any]:
    """Name all that the results depend on, as plain JSON."""
    description = job.choice.model.description
    listing = [f"{name!a} {(job.images / name).stat().st_size}" for name in files]
    settings = {
        "images": text_hash(listing),
        **job.choice.settings(),
        **job.choice.model.classifier.speed.settings(),
        "batch": job.batch,
        "size": None if description.size is None else list(description.size),
        "crop_pct": description.crop_pct,
        "classes": None if description.classes is None else text_hash([ascii(name) for name in description.classes]),
    }
    return plain_settings(settings)


def _inferred(job: AdaptJob, going_on: bool, console: Console) -> SourceStatistics:
    """Infer statistics and keep them, so that a continuation need not infer again."""
    path = job.out / INFERRED
    if going_on and path.exists():
        return SourceStatistics.load(path, job.choice.model.classifier)
    stats = job.choice.infer(console)
    stats.save(path)
    return stats


def _short(pixels: Tensor) -> str:
    return ", ".join(f"{value:.4g}" for value in pixels.flatten().tolist())


def _row(*cells: str) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode(errors="surrogateescape")  # file names need not be UTF-8


def _opened_to_go_on(path: Path) -> BinaryIO:
    """Open a file, made if need be, to write on from what it holds."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
