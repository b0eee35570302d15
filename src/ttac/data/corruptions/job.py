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

from ttac.common.environment import environment
from ttac.common.files import write_json
from ttac.common.resumable import PROGRESS, alone_in, begin, image_progress, plain_settings, read_record, signals_noted
from ttac.data.array_file import ArrayFile, check_space, has_labels, save_labels
from ttac.data.corruptions import CORRUPTIONS, EXTRA, Corruption
from ttac.data.corruptions.constants import SEVERITIES
from ttac.data.corruptions.frost import FrostPhotographs
from ttac.data.labelled import LabelledImages
from ttac.data.sets import read_data
from ttac.model.weights import usable_device

FORMAT = "ttac.corruptions/1"
LABELS, RECORD = "labels.npy", "record.json"
FILES = {name: f"{name}.npy" for name in (*CORRUPTIONS, *EXTRA)}


@dataclass(frozen=True)
class CorruptJob:
    """What to corrupt, how, and where the arrays go."""

    data: str  # see `read_data`
    out: Path
    corruptions: tuple[str, ...] = CORRUPTIONS
    seed: int = 0
    frost: Path | None = None  # folder of photographs; None: a procedural texture
    split: str = "test"
    samples: int | None = None  # chosen at random; None: all
    size: int | None = None  # of image files, which are resized and cropped to it
    batch: int = 500
    device: str = "cpu"


def run_corrupt(job: CorruptJob, console: Console) -> None:
    """Do the job, or the rest of it."""
    data = _read(job)
    photographs = None if job.frost is None else FrostPhotographs.read(job.frost)
    device = usable_device(job.device)
    for name in job.corruptions:  # what cannot be corrupted is refused before anything is written
        Corruption(name, seed=job.seed, photographs=photographs)(
            data.read(torch.tensor([0])).to(device), torch.tensor([0])
        )
    settings = _settings(job, data, photographs)
    worker = _Worker(job, data, photographs, device, settings, console)
    listed = _listed(job.out, settings)
    there = [name for name, file in FILES.items() if (job.out / file).exists()]
    names = list(dict.fromkeys([*job.corruptions, *(listed or ()), *there]))
    check_space(job.out, {FILES[name]: int(np.prod(worker.shape)) for name in names})
    with alone_in(job.out):
        if listed is not None and worker.is_complete(names, listed):
            return
        others = [file for name, file in FILES.items() if name not in (listed or ())]
        begin(job.out, settings, [*([LABELS, RECORD] if listed is None else []), *others])
        worker.run(names)


class _Worker:
    """One process's share of a job."""

    def __init__(
        self,
        job: CorruptJob,
        data: LabelledImages,
        photographs: FrostPhotographs | None,
        device: torch.device,
        settings: dict[str, Any],
        console: Console,
    ) -> None:
        self.job, self.data, self.photographs, self.device = job, data, photographs, device
        self.settings, self.console = settings, console
        self.shape = (len(SEVERITIES) * len(data), *data.size, data.channels)
        self.labels = data.labels.repeat(len(SEVERITIES))

    def is_complete(self, names: list[str], listed: list[str]) -> bool:
        """Tell whether the record lists all that is to be there, and its files are; damaged ones raise an error."""
        out = self.job.out
        labelled = has_labels(out / LABELS, self.labels, self.data.num_classes)
        whole = [self._file(name).whole for name in listed]
        if not all(whole) or set(names) != set(listed):
            return False
        if not labelled:
            save_labels(out / LABELS, self.labels, self.data.num_classes)
        (out / PROGRESS).unlink(missing_ok=True)
        done = "nothing to do" if labelled else f"{LABELS} was missing and is written again"
        self.console.print(f"{out} is complete: {done}", markup=False)
        return True

    def run(self, names: list[str]) -> None:
        save_labels(self.job.out / LABELS, self.labels, self.data.num_classes)
        files = {name: self._file(name) for name in names}
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
                    file.fill(partial(self._produce, name), noted)
        self._finish([FILES[name] for name in FILES if name in files])

    def _file(self, name: str) -> ArrayFile:
        return ArrayFile(self.job.out / FILES[name], self.shape, self.settings)

    def _produce(self, name: str, start: int) -> np.ndarray:
        """Corrupt a batch from a row of the file on; a batch has one severity."""
        severity, first = divmod(start, len(self.data))
        rows = torch.arange(first, min(first + self.job.batch, len(self.data)))
        corruption = Corruption(name, SEVERITIES[severity], self.job.seed, self.photographs)
        images = corruption(self.data.read(rows).to(self.device), rows)
        self.written += len(rows)
        self.progress.update(self.task, advance=len(rows), rate=self._rate())
        pixels: np.ndarray = images.permute(0, 2, 3, 1).cpu().numpy()
        return pixels

    def _rate(self) -> float:
        return self.written / (time.monotonic() - self.started)

    def _finish(self, files: list[str]) -> None:
        out = self.job.out
        record = {
            "format": FORMAT,
            "files": files,
            "images": len(self.data),
            "severities": list(SEVERITIES),  # row (s - 1) * images + i is image i at severity s
            "settings": self.settings,
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
    data = read_data(job.data, split=job.split, size=size)
    if size is not None and data.size != size:
        raise ValueError(f"{job.data} is of {data.size[0]} x {data.size[1]}: --size is for image files alone")
    return data.some(job.samples).in_memory()  # every image comes up once a severity of each corruption


def _listed(out: Path, settings: dict[str, Any]) -> list[str] | None:
    """Give the corruptions that the record in `out` lists, None where there is no record."""
    record = read_record(out, RECORD, FORMAT, settings)
    if record is None:
        return None
    files = record.get("files")
    if not isinstance(files, list) or not all(file in FILES.values() for file in files):
        raise ValueError(f"{out} holds a {RECORD} of something else: choose another --out")
    return [name for name, file in FILES.items() if file in files]


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
