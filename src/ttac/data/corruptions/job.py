"""`ttac corrupt`: write a data set under all severities of corruptions, in the layout of the public CIFAR-C."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from ttac.data.array_job import ArrayJob, Files
from ttac.data.corruptions import Corruption, corruption_names
from ttac.data.corruptions.constants import NAMES, SEVERITIES
from ttac.data.corruptions.frost import FrostPhotographs
from ttac.data.fields import CorruptJob
from ttac.data.labelled import LabelledImages
from ttac.data.sets import find_data
from ttac.model.weights import usable_device

FORMAT = "ttac.corruptions/1"
FILES = {f"{name}.npy": name for name in NAMES}


def run_corrupt(job: CorruptJob, console: Console) -> None:
    """Do the job, or the rest of it."""
    data, chosen = _read(job), corruption_names(job.corruptions)
    photographs = None if job.frost is None else FrostPhotographs.read(job.frost)
    device = usable_device(job.device)

    def corrupted(name: str, severity: int, rows: Tensor) -> np.ndarray:
        images = Corruption(name, severity, job.seed, photographs)(data.read(rows).to(device), rows)
        pixels: np.ndarray = images.permute(0, 2, 3, 1).cpu().numpy()
        return pixels

    for name in chosen:  # what cannot be corrupted is refused before anything is written
        corrupted(name, SEVERITIES[-1], torch.tensor([0]))
    settings = _settings(job, data, photographs)
    arrays = ArrayJob(job.out, FORMAT, list(FILES), settings, data, console, copies=len(SEVERITIES))

    def produce(file: str, start: int) -> np.ndarray:
        """Corrupt a batch from a row of the file on; a batch has one severity."""
        severity, first = divmod(start, len(data))
        rows = torch.arange(first, min(first + job.batch, len(data)))
        return corrupted(FILES[file], SEVERITIES[severity], rows)

    def write(files: Files) -> tuple[dict[str, Any], str]:
        written, rate = arrays.fill(files, produce)
        record = {
            "files": [file for file in FILES if file in files],
            "severities": list(SEVERITIES),  # row (s - 1) * images + i is image i at severity s
            "images_per_second": round(rate, 1),
        }
        return record, f"{written} images written to {len(files)} files, {rate:.1f} images a second"

    arrays.run([f"{name}.npy" for name in chosen], write)


def _read(job: CorruptJob) -> LabelledImages:
    size = None if job.size is None else (job.size, job.size)
    data = find_data(job.data).read(job.split, size=size)
    if size is not None and data.size != size:
        raise ValueError(f"{job.data} is of {data.size[0]} x {data.size[1]}: --size is for image files alone")
    return data.some(job.samples).in_memory()  # every image comes up once a severity of each corruption


def _settings(job: CorruptJob, data: LabelledImages, photographs: FrostPhotographs | None) -> dict[str, Any]:
    """Name all that the arrays depend on, but which corruptions there are: others can be added."""
    notes = Corruption("frost", seed=job.seed, photographs=photographs).notes(min(data.size))
    return {
        "images": len(data),
        "data": data.fingerprint,
        "size": data.size,
        **{key: notes[key] for key in ("seed", "constants", "frost")},
        "device": job.device,
    }
