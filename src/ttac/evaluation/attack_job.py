"""`ttac attack`: write a data set that deceives a model, and say how often it does."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from ttac.data.array_job import RECORD, ArrayJob, Files
from ttac.data.attacks import freeze, pgd
from ttac.data.for_model import read_for
from ttac.data.labelled import LabelledImages, hash_of
from ttac.data.sets import find_data
from ttac.evaluation.spec import AttackJob
from ttac.model.heads import evaluating
from ttac.model.weights import check_size

__all__ = ["RECORD", "run_attack"]
FORMAT = "ttac.attack/1"
IMAGES = "images.npy"


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

    def results(self) -> dict[str, float | None]:
        """Give errors in percent, and the share of those right before that are wrong after; None where none was."""
        return {
            "clean_error": 100 * (self.images - self.right_before) / self.images,
            "adversarial_error": 100 * (self.images - self.right_after) / self.images,
            "success_rate": 100 * self.deceived / self.right_before if self.right_before else None,
        }


def run_attack(job: AttackJob, console: Console) -> None:
    """Do the job, or the rest of it."""
    job.loaded.tell(console)
    data = read_for(job.loaded.description, find_data(job.data), job.split).some(job.samples)
    check_size(job.loaded.classifier, data.size)
    arrays = ArrayJob(job.out, FORMAT, (IMAGES,), _settings(job, data), data, console)
    arrays.run((IMAGES,), lambda files: _attack(job, arrays, files))


def _attack(job: AttackJob, arrays: ArrayJob, files: Files) -> tuple[dict[str, Any], str]:
    """Attack the images that are not in the file yet, and give what a record is to say of all of them."""
    data, file = arrays.data, files[IMAGES]
    classifier, tally, there = job.loaded.classifier, Tally(), file.rows

    def count(rows: Tensor, clean: Tensor, frozen: Tensor) -> None:
        """Count what the model says of 8-bit images, as others will read them."""
        with evaluating(classifier), torch.no_grad():
            before, after = (
                classifier(classifier.check(images.float() / 255)).argmax(1).cpu() == data.labels[rows]
                for images in (clean, frozen)
            )
        tally.add(before, after)

    def produce(_: str, start: int) -> np.ndarray:
        """Attack a batch from a row of the file on: `[n, H, W, C]`."""
        rows = torch.arange(start, min(start + job.batch, len(data)))
        clean = data.read(rows)
        changed = pgd(classifier, clean.float() / 255, data.labels[rows], job.options, rows)
        frozen = freeze(changed.cpu(), clean, job.options)
        count(rows, clean, frozen)
        pixels: np.ndarray = frozen.permute(0, 2, 3, 1).numpy()
        return pixels

    for start in range(0, there, job.batch):
        pixels = torch.from_numpy(file.read(start, start + job.batch)).permute(0, 3, 1, 2)
        rows = torch.arange(start, start + len(pixels))
        count(rows, data.read(rows), pixels)
    started = time.monotonic()
    arrays.fill(files, produce, lambda: f", {tally.deceived} of {tally.right_before} deceived")
    # The seconds are of the images after those that were there.
    results = {**tally.results(), "seconds": time.monotonic() - started, "continued_at": there}
    rate = results["success_rate"]
    success = "unknown, none was right before" if rate is None else f"{rate:.2f} %"
    errors = f"error {results['clean_error']:.2f} % before and {results['adversarial_error']:.2f} % after"
    return results, f"{len(data)} images, {errors}, success rate {success}"


def _settings(job: AttackJob, data: LabelledImages) -> dict[str, Any]:
    """Name all that the images depend on; a batch of another size sums in another order."""
    return {
        "images": len(data),
        "data": data.fingerprint,
        "labels": hash_of([data.labels.numpy()]),  # as the model numbers them, which the data know nothing of
        "size": data.size,
        "model": job.loaded.classifier.fingerprint(),
        **dataclasses.asdict(job.options),
        "batch": job.batch,
        "device": str(job.loaded.classifier.mean.device),
    }
