"""`ttac adapt`: stream a folder through an adapter, write what it predicts, and go on after an interruption."""

from __future__ import annotations

import dataclasses
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console
from torch import Tensor

from ttac.adaptation.adapter import Adapter
from ttac.common.cells import csv_line
from ttac.common.files import check_space, replacing, text_hash, writing
from ttac.common.resumable import Checkpoints, JobFolder, alone_in, image_progress, signals_noted
from ttac.data.folder import FolderStream, file_bytes, image_size, list_images, read_image
from ttac.data.labels_file import read_labels
from ttac.evaluation.comparison import Change, Comparison
from ttac.evaluation.comparison_page import class_namer, render_page, terminal_table
from ttac.evaluation.engine import Outcome, StreamWalk, losses_field
from ttac.evaluation.forecast import TRIED, counted, foretell, nothing_learned
from ttac.evaluation.loggers import Callbacks, open_loggers
from ttac.evaluation.prepare import PreparedMethod, classes_hash
from ttac.evaluation.records import Record
from ttac.evaluation.spec import AdaptJob
from ttac.model.weights import LoadedModel, ModelDescription, check_size, save_model

PREDICTIONS, WEIGHTS, RECORD = "predictions.csv", "adapted.safetensors", "record.json"
PART, INFERRED, PAGE = "predictions.csv.part", "inferred.safetensors", "comparison.html"
BATCH = 64  # images that arrive at a time where neither a user nor the method's window says how many


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
    method = PreparedMethod(job.method, job.model.load(), guard=job.guard)
    labels = _read_labels(job, method.model, files)
    folder = JobFolder(job.out, _settings(job, method, files, labels))
    if folder.is_complete(PREDICTIONS, lambda: Record.load(job.out / RECORD).provenance, console):
        return
    saved = folder.saved((WEIGHTS, RECORD, PAGE), lambda content: _Position(**content["position"]))
    classifier, description = method.model.classifier, method.model.description
    size = description.size or image_size(job.images, files)
    check_size(classifier, size)
    pixels = f"mean {_short(classifier.mean)}, std {_short(classifier.std)}"
    console.print(
        f"{description.arch}: {classifier.num_classes} classes, {size[0]} x {size[1]}, {pixels}", markup=False
    )
    if saved is None:
        (job.out / INFERRED).unlink(missing_ok=True)
    adapter = method.adapter(console, keep=job.out / INFERRED)
    comparison = Comparison(adapter, classifier if job.compare else None)
    check_space(job.out, adapter.memory_bytes())  # about what a checkpoint and the weights take
    with (
        alone_in(job.out), writing(job.out), _opened_to_go_on(job.out / PART) as table,
        Callbacks(open_loggers(job.log, job.out.name)) as told,
    ):  # fmt: skip
        _Worker(job, folder, adapter, description, comparison, labels, console, table, told).run(files, saved)


@dataclass
class _Worker:
    """One process's share of a job."""

    job: AdaptJob
    folder: JobFolder
    adapter: Adapter
    description: ModelDescription
    comparison: Comparison
    labels: dict[str, int]  # by file; empty where none are known
    console: Console
    table: BinaryIO
    told: Callbacks
    position: _Position = field(default_factory=_Position)

    def run(self, files: list[str], saved: dict[str, Any] | None) -> None:
        # Made before any state is loaded: an interrupted stream is still one stream.
        self.clock = StreamWalk(self.adapter)
        if saved is not None:
            self._go_on_from(saved)
        self.table.truncate(self.position.csv_bytes)
        self.table.seek(self.position.csv_bytes)
        job, known, first, report = self.job, self.description, self.position.next_batch, self._report_unreadable
        channels, window = self.adapter.classifier.channels, int(getattr(self.adapter.options, "window", BATCH))
        batch = job.batch or window
        self.stream = FolderStream(job.images, files, batch, known.size, channels, known.crop_pct, report, first)
        few = dataclasses.replace(self.stream, files=files[:TRIED], batch=TRIED, unreadable=lambda *_: None)
        told = foretell(len(files), self.adapter, few if saved is None else (), beside=job.compare)
        self.console.print(told, markup=False)
        if saved is None:
            self.table.write(_row("file", "label", "confidence"))
            self._checkpoint()
        self._walk()
        if not self.clock.samples:
            raise ValueError(f"none of {len(files)} images could be read")
        self._finish(files)

    def _go_on_from(self, saved: dict[str, Any]) -> None:
        self.adapter.load_state_dict(saved["adapter"])
        try:
            self.comparison.load_state_dict(saved["comparison"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise self.folder.damaged(error) from error
        self.position = position = _Position(**saved["position"])
        if os.fstat(self.table.fileno()).st_size < position.csv_bytes:
            raise ValueError(f"{self.job.out / PART} has lost lines: delete {self.job.out} and start again")
        self.clock.samples, self.clock.seconds = self.adapter.samples_seen, position.seconds
        self.clock.batch_sizes = set(position.batch_sizes)
        position.continued_at.append(self.clock.samples)
        self.console.print(f"going on after {self.clock.samples} images", markup=False)

    def _walk(self) -> None:
        clock, total = self.clock, len(self.stream.files)
        started, before = time.monotonic(), clock.samples
        note = "{task.fields[rate]:.1f} images/s, {task.fields[updates]} updates{task.fields[losses]}"
        with signals_noted(self.console) as noted, image_progress(self.console, note) as progress:
            task = progress.add_task("adapting", total=total, rate=0.0, updates=0, losses="")
            checkpoints = Checkpoints(self.job.checkpoint_every, noted, self._checkpoint)
            stream = ((images, (images, names)) for images, names in self.stream)
            for outcome, (images, names) in clock.walk(stream, ends=lambda: self.stream.is_last):
                self._write_predictions(names, outcome)
                self.comparison.add(images, names, outcome.logits, self.labels, last=self.stream.is_last)
                self.position.updates += len(outcome.update_seconds)
                self.told.tell(self.adapter.samples_seen, outcome)
                rate = (clock.samples - before) / (time.monotonic() - started)
                read = min(self.stream.next_batch * self.stream.batch, total)
                fields = losses_field(outcome)
                progress.update(task, completed=read, rate=rate, updates=self.position.updates, **fields)
                checkpoints.after_step(f"{clock.samples} images")

    def _write_predictions(self, names: list[str], outcome: Outcome) -> None:
        confidence, label = outcome.logits.float().softmax(1).max(1)
        classes = self.description.classes
        for name, number, share in zip(names, label.tolist(), confidence.tolist(), strict=True):
            self.table.write(_row(name, classes[number] if classes else str(number), f"{share:.6f}"))

    def _report_unreadable(self, name: str, reason: str) -> None:
        self.position.unreadable.append([name, reason])
        self.console.print(f"skipped {name!a}: {reason}", markup=False)

    def _checkpoint(self) -> None:
        """Note where the job is; the table is on disk before the note that counts its bytes."""
        self._sync_table()
        position = self.position
        position.next_batch, position.csv_bytes = self.stream.next_batch, self.table.tell()
        position.seconds, position.batch_sizes = self.clock.seconds, sorted(self.clock.batch_sizes)
        states = {"adapter": self.adapter.state_dict(), "comparison": self.comparison.state_dict()}
        self.folder.save(position=dataclasses.asdict(position), **states)

    def _sync_table(self) -> None:
        self.table.flush()
        os.fsync(self.table.fileno())

    def _finish(self, files: list[str]) -> None:
        """Write the results; the predictions take their name last, so their being there means that all is."""
        out, position = self.job.out, self.position
        save_model(out / WEIGHTS, self.adapter.adapted().model, self.description)
        notes = {
            "images": self.job.images.resolve().name,
            "files": len(files),
            # Latencies are of the images after the last continuation.
            **{name: getattr(position, name) for name in ("unreadable", "updates", "continued_at")},
            "settings": self.folder.settings,
        }
        summary = self.comparison.summary(self.clock.seconds)
        errors = self.comparison.errors if self.labels else None
        record = self.clock.record(errors=errors, protocol=None, notes=notes)
        dataclasses.replace(record, comparison=summary).save(out / RECORD)
        if self.job.compare:
            self._show(summary)
        self._sync_table()
        self.table.close()  # Windows renames no open file
        (out / PART).replace(out / PREDICTIONS)
        self.folder.finish()
        error = "" if record.error is None else f", {record.error:.2f} % error"
        guarded = f"; {self.adapter.guard}" if self.adapter.guard else ""
        self.console.print(
            f"{out}: {counted(self.clock.samples, 'image')} predicted, {counted(position.updates, 'update')}, "
            f"{len(position.unreadable)} unreadable{error}{guarded}",
            markup=False,
        )
        reason = nothing_learned(self.adapter, position.updates)
        if reason:
            self.console.print(f"warning: {reason}", markup=False)

    def _show(self, summary: dict[str, Any]) -> None:
        """Show the comparison here, and write its page."""
        job, known, title = self.job, self.description, self.adapter.capabilities.title
        name = class_namer(known.classes)
        changes = [Change(*change) for change in self.comparison.changes]
        channels = self.adapter.classifier.channels
        facts = {
            "Images": f"{self.clock.samples:,} of {job.images.resolve().name}",
            "Unreadable": f"{len(self.position.unreadable):,}",
            "Model": known.arch,
            "Method": title + ("" if job.method.preset is None else f", preset {job.method.preset}"),
            "Updates": f"{self.position.updates:,}",
            "Time": f"{self.clock.seconds:,.1f} s",
        }
        page = render_page(
            summary,
            changes,
            method=title,
            facts=facts,
            name=name,
            read=lambda file: read_image(job.images / file, known.size, channels, known.crop_pct),
        )
        with replacing(job.out / PAGE) as draft:  # names of files and of classes need not be UTF-8
            draft.write_text(page, encoding="utf-8", errors="backslashreplace")
        self.console.print(terminal_table(summary, title, name), soft_wrap=False)


def _read_labels(job: AdaptJob, model: LoadedModel, files: list[str]) -> dict[str, int]:
    if job.labels is None:
        return {}
    return read_labels(job.labels, files, model.classifier.num_classes, model.description.classes)


def _settings(job: AdaptJob, method: PreparedMethod, files: list[str], labels: dict[str, int]) -> dict[str, Any]:
    """Name all that the results depend on, as plain JSON."""
    description = method.model.description
    return {
        "images": text_hash([f"{name!a} {file_bytes(job.images / name)}" for name in files]),
        **method.settings(),
        **method.model.classifier.speed.settings(),
        "batch": job.batch,
        "size": description.size,
        "crop_pct": description.crop_pct,
        "classes": classes_hash(description.classes),
        "labels": text_hash([str(labels[name]) for name in files]) if labels else None,
        "compare": job.compare,
    }


def _short(pixels: Tensor) -> str:
    return ", ".join(f"{value:.4g}" for value in pixels.flatten().tolist())


def _row(*cells: str) -> bytes:
    return csv_line(*cells).encode(errors="surrogateescape")  # file names need not be UTF-8


def _opened_to_go_on(path: Path) -> BinaryIO:
    """Open a file, made if need be, to write on from what it holds."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
