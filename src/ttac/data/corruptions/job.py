"""`ttac corrupt`: write a data set under all severities of corruptions, in the layout of the public CIFAR-C."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from ttac.data.array_file import ArrayFile, check_space, save_labels
from ttac.data.corruptions import CORRUPTIONS, EXTRA, Corruption
from ttac.data.corruptions.constants import SEVERITIES
from ttac.data.corruptions.frost import FrostPhotographs
from ttac.data.labelled import LabelledImages
from ttac.data.sets import read_data
from ttac.files import write_json
from ttac.jobs import PROGRESS, alone_in, begin, image_progress, is_recorded, plain_settings, signals_noted
from ttac.report.records import environment
from ttac.source.weights import usable_device

FORMAT = "ttac.corruptions/1"
LABELS, RECORD = "labels.npy", "record.json"


@dataclass(frozen=True)
class CorruptJob:
    """What to corrupt, how, and where the arrays go."""

    data: str  # see `read_data`
    out: Path
    corruptions: tuple[str, ...] = CORRUPTIONS
    seed: int = 0
    frost: Path | None = None  # folder of photographs; None: a procedural texture
    split: str = "test"
    samples: int | None = None  # the first ones; None: all
    size: int | None = None  # of image files, which are resized and cropped to it
    batch: int = 500
    device: str = "cpu"


def run_corrupt(job: CorruptJob, console: Console) -> None:
    """Do the job, or the rest of it."""
    data = _read(job)
    photographs = None if job.frost is None else FrostPhotographs.read(job.frost)
    chosen = {
        name: [Corruption(name, severity, job.seed, photographs) for severity in SEVERITIES] for name in job.corruptions
    }
    device = usable_device(job.device)
    for first, *_ in chosen.values():  # what cannot be corrupted is refused before anything is written
        first(data.read(torch.tensor([0])).to(device), torch.tensor([0]))
    settings = _settings(job, data, photographs)
    begun = is_recorded(job.out, RECORD, FORMAT, settings)
    left = [name for name in chosen if not (job.out / f"{name}.npy").exists()]
    if begun and not left:
        console.print(f"{job.out} is complete: nothing to do", markup=False)
        return
    shape = (len(SEVERITIES) * len(data), *data.size, data.channels)
    check_space(job.out, {f"{name}.npy": int(np.prod(shape)) for name in chosen})
    with alone_in(job.out):
        if not begun:
            begin(job.out, settings, [LABELS, RECORD, *(f"{name}.npy" for name in (*CORRUPTIONS, *EXTRA))])
        _Worker(job, data, device, shape, console).run(chosen, settings)


class _Worker:
    """One process's share of a job."""

    def __init__(
        self, job: CorruptJob, data: LabelledImages, device: torch.device, shape: tuple[int, ...], console: Console
    ) -> None:
        self.job, self.data, self.device, self.shape, self.console = job, data, device, shape, console

    def run(self, chosen: dict[str, list[Corruption]], settings: dict[str, Any]) -> None:
        out = self.job.out
        save_labels(out / LABELS, self.data.labels.repeat(len(SEVERITIES)), self.data.num_classes)
        files = {name: ArrayFile(out / f"{name}.npy", self.shape) for name in chosen}
        there = sum(file.rows for file in files.values())
        if there:
            self.console.print(f"going on after {there} images", markup=False)
        note = "{task.fields[rate]:.1f} images/s"
        with signals_noted(self.console) as noted, image_progress(self.console, note) as progress:
            self.progress, self.started, self.written = progress, time.monotonic(), 0
            self.task = progress.add_task("", total=len(files) * self.shape[0], completed=there, rate=0.0)
            for number, (name, file) in enumerate(files.items(), 1):
                progress.update(self.task, description=f"{name}, file {number} of {len(files)}")
                with file:
                    file.fill(partial(self._produce, chosen[name]), noted)
        self._finish(settings)

    def _produce(self, by_severity: list[Corruption], start: int) -> np.ndarray:
        """Corrupt a batch from a row of the file on; a batch has one severity."""
        severity, first = divmod(start, len(self.data))
        rows = torch.arange(first, min(first + self.job.batch, len(self.data)))
        images = by_severity[severity](self.data.read(rows).to(self.device), rows)
        self.written += len(rows)
        self.progress.update(self.task, advance=len(rows), rate=self._rate())
        pixels: np.ndarray = images.permute(0, 2, 3, 1).cpu().numpy()
        return pixels

    def _rate(self) -> float:
        return self.written / (time.monotonic() - self.started)

    def _finish(self, settings: dict[str, Any]) -> None:
        out = self.job.out
        files = [f"{name}.npy" for name in (*CORRUPTIONS, *EXTRA) if (out / f"{name}.npy").exists()]
        record = {
            "format": FORMAT,
            "files": files,
            "images": len(self.data),
            "severities": list(SEVERITIES),  # row (s - 1) * images + i is image i at severity s
            "settings": settings,
            "images_per_second": round(self._rate(), 1),
            "environment": environment(),
        }
        write_json(out / RECORD, record)
        (out / PROGRESS).unlink(missing_ok=True)
        self.console.print(
            f"{out}: {self.written} images written to {len(files)} files, {self._rate():.1f} images a second",
            markup=False,
        )


def _read(job: CorruptJob) -> LabelledImages:
    size = None if job.size is None else (job.size, job.size)
    # Every image comes up once a severity of each corruption.
    return read_data(job.data, split=job.split, size=size).first(job.samples).in_memory()


def _settings(job: CorruptJob, data: LabelledImages, photographs: FrostPhotographs | None) -> dict[str, Any]:
    """Name all that the arrays depend on, but which corruptions there are: others can be added."""
    notes = Corruption("frost", seed=job.seed, photographs=photographs).notes(min(data.size))
    return plain_settings(
        {
            "images": len(data),
            "data": data.fingerprint,
            "size": data.size,
            **{key: notes[key] for key in ("seed", "constants", "frost")},
            "device": job.device,
        }
    )
