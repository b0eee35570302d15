"""`ttac attack`: write a data set that deceives a model, and say how often it does."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from ttac.common.environment import environment
from ttac.common.files import write_json
from ttac.common.resumable import PROGRESS, alone_in, begin, image_progress, plain_settings, read_record, signals_noted
from ttac.data.array_file import ArrayFile, check_space, has_labels, save_labels
from ttac.data.attacks import PGDOptions, freeze, pgd
from ttac.data.for_model import read_for
from ttac.data.labelled import LabelledImages, hash_of
from ttac.data.sets import find_data
from ttac.model.heads import evaluating
from ttac.model.weights import LoadedModel, check_size

FORMAT = "ttac.attack/1"
IMAGES, LABELS, RECORD = "images.npy", "labels.npy", "record.json"


@dataclass(frozen=True)
class AttackJob:
    """What to attack, on what, how, and where the images go."""

    model: LoadedModel
    data: str  # see `find_data`
    out: Path
    options: PGDOptions
    split: str = "test"
    samples: int | None = None  # chosen at random; None: all
    batch: int = 256

    def __post_init__(self) -> None:
        """Refuse a ball in which 8-bit images have no room to move."""
        if self.options.eps < 1 / 255:
            raise ValueError(f"eps {self.options.eps:.3g} is less than one level of 8-bit images, 1/255")


@dataclass
class Tally:
    """How many images a model took for what they are, before and after the attack.

    >>> tally = Tally()
    >>> tally.add(torch.tensor([True, True, False]), torch.tensor([False, True, False]))
    >>> tally.results()
    {'clean_error': 33.333333333333336, 'adversarial_error': 66.66666666666667, 'success_rate': 50.0}
    """

    images: int = 0
    right_before: int = 0
    right_after: int = 0
    deceived: int = 0  # right before and wrong after

    def add(self, before: Tensor, after: Tensor) -> None:
        """Count some images by whether they were right before, and are after."""
        self.images += len(before)
        self.right_before += int(before.sum())
        self.right_after += int(after.sum())
        self.deceived += int((before & ~after).sum())

    @property
    def success_rate(self) -> float | None:
        """The share of the images that were right before and are wrong after, in percent; None where none was right."""
        return 100 * self.deceived / self.right_before if self.right_before else None

    def results(self) -> dict[str, float | None]:
        """Give errors and success in percent."""
        return {
            "clean_error": 100 * (self.images - self.right_before) / self.images,
            "adversarial_error": 100 * (self.images - self.right_after) / self.images,
            "success_rate": self.success_rate,
        }


def run_attack(job: AttackJob, console: Console) -> None:
    """Do the job, or the rest of it."""
    data = read_for(job.model.description, find_data(job.data), job.split).some(job.samples)
    check_size(job.model.classifier, data.size)
    settings = _settings(job, data)
    shape = (len(data), *data.size, data.channels)
    recorded = read_record(job.out, RECORD, FORMAT, settings) is not None
    if recorded:
        labelled = has_labels(job.out / LABELS, data.labels, data.num_classes)
        if ArrayFile(job.out / IMAGES, shape, settings).whole:
            if not labelled:
                save_labels(job.out / LABELS, data.labels, data.num_classes)
            (job.out / PROGRESS).unlink(missing_ok=True)
            done = "nothing to do" if labelled else f"{LABELS} was missing and is written again"
            console.print(f"{job.out} is complete: {done}", markup=False)
            return
    check_space(job.out, {IMAGES: int(np.prod(shape))})
    with alone_in(job.out):
        begin(job.out, settings, () if recorded else (IMAGES, LABELS, RECORD))
        save_labels(job.out / LABELS, data.labels, data.num_classes)
        with ArrayFile(job.out / IMAGES, shape, settings) as file:
            _Worker(job, data, file, console).run(settings)


class _Worker:
    """One process's share of a job."""

    def __init__(self, job: AttackJob, data: LabelledImages, file: ArrayFile, console: Console) -> None:
        self.job, self.data, self.file, self.console = job, data, file, console
        self.classifier = job.model.classifier
        self.tally = Tally()

    def run(self, settings: dict[str, Any]) -> None:
        there = self.file.rows
        if there:
            self.console.print(f"going on after {there} images", markup=False)
        for start in range(0, there, self.job.batch):
            pixels = self.file.read(start, start + self.job.batch)
            rows = torch.arange(start, start + len(pixels))
            self._count(rows, self.data.read(rows), torch.from_numpy(pixels).permute(0, 3, 1, 2))
        note = "{task.fields[rate]:.1f} images/s, {task.fields[deceived]} of {task.fields[right]} deceived"
        started = time.monotonic()
        with signals_noted(self.console) as noted, image_progress(self.console, note) as progress:
            task = progress.add_task("attacking", total=len(self.data), completed=there, rate=0.0, deceived=0, right=0)

            def produce(start: int) -> np.ndarray:
                pixels, tally = self._attack(start), self.tally
                rate = (tally.images - there) / (time.monotonic() - started)
                progress.update(
                    task, completed=tally.images, rate=rate, deceived=tally.deceived, right=tally.right_before
                )
                return pixels

            self.file.fill(produce, noted)
        self._finish(settings, there, time.monotonic() - started)

    def _attack(self, start: int) -> np.ndarray:
        """Attack a batch from a row of the file on: `[n, H, W, C]`."""
        rows = torch.arange(start, min(start + self.job.batch, len(self.data)))
        clean, options = self.data.read(rows), self.job.options
        changed = pgd(self.classifier, clean.float() / 255, self.data.labels[rows], options, rows)
        frozen = freeze(changed.cpu(), clean, options)
        self._count(rows, clean, frozen)
        pixels: np.ndarray = frozen.permute(0, 2, 3, 1).numpy()
        return pixels

    def _count(self, rows: Tensor, clean: Tensor, frozen: Tensor) -> None:
        """Count what the model says of 8-bit images, as others will read them."""
        with evaluating(self.classifier), torch.no_grad():
            before, after = (
                self.classifier(self.classifier.check(images.float() / 255)).argmax(1).cpu() == self.data.labels[rows]
                for images in (clean, frozen)
            )
        self.tally.add(before, after)

    def _finish(self, settings: dict[str, Any], there: int, seconds: float) -> None:
        job, results = self.job, self.tally.results()
        record = {
            "format": FORMAT,
            "images": len(self.data),
            **results,
            "seconds": seconds,
            "continued_at": there,  # the seconds are of the images after it
            "settings": settings,
            "environment": environment(),
        }
        write_json(job.out / RECORD, record)
        (job.out / PROGRESS).unlink(missing_ok=True)
        rate = results["success_rate"]
        self.console.print(
            f"{job.out}: {len(self.data)} images, error {results['clean_error']:.2f} % before and "
            f"{results['adversarial_error']:.2f} % after, success rate "
            + ("unknown, none was right before" if rate is None else f"{rate:.2f} %"),
            markup=False,
        )


def _settings(job: AttackJob, data: LabelledImages) -> dict[str, Any]:
    """Name all that the images depend on; a batch of another size sums in another order."""
    return plain_settings(
        {
            "images": len(data),
            "data": data.fingerprint,
            "labels": hash_of([data.labels.numpy()]),  # as the model numbers them, which the data know nothing of
            "size": data.size,
            "model": job.model.classifier.fingerprint(),
            **dataclasses.asdict(job.options),
            "batch": job.batch,
            "device": str(job.model.classifier.mean.device),
        }
    )
