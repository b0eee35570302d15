"""Data sets that take hours to write as arrays: what `ttac corrupt` and `ttac attack` share."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ttac.common.environment import environment
from ttac.common.files import write_json
from ttac.common.resumable import JobFolder, alone_in, image_progress, read_json, signals_noted
from ttac.data.array_file import ArrayFile, check_space_of, ensure_labels
from ttac.data.labelled import LabelledImages

LABELS, RECORD = "labels.npy", "record.json"
Files = dict[str, ArrayFile]  # by name


@dataclass(frozen=True)
class ArrayJob:
    """Arrays in the folder `out`, each with `copies` of the images of `data` one after the other, and their labels."""

    out: Path
    kind: str  # format of the record
    known: Sequence[str]  # names of all arrays that there may be
    settings: Mapping[str, Any]  # all that the arrays depend on
    data: LabelledImages
    console: Console
    copies: int = 1

    def run(self, chosen: Sequence[str], write: Callable[[Files], tuple[dict[str, Any], str]]) -> None:
        """Have those chosen written, and whatever is there already gone on with, unless all of it is whole.

        `write` gives what the record is to say, and a line that sums it up.
        """
        folder, data = JobFolder(self.out, self.settings), self.data
        shape = (self.copies * len(data), *data.size, data.channels)
        record = folder.record(RECORD, lambda: read_json(self.out / RECORD, self.kind))
        recorded = () if record is None else record.get("files", chosen)
        listed = [name for name in self.known if name in recorded]
        others = [name for name in self.known if name not in listed]
        there = [name for name in others if (self.out / name).exists()]
        names = list(dict.fromkeys([*chosen, *listed, *there]))
        check_space_of(self.out, dict.fromkeys(names, math.prod(shape)))
        with alone_in(self.out):
            as_recorded = record is not None and set(names) == set(listed)
            # The files say themselves how far they are; of a job that has no record, the settings alone are noted.
            unrecorded = [*others, *([LABELS, RECORD] if record is None else [])]
            if not as_recorded and folder.saved(unrecorded, lambda content: None) is None:
                folder.save()
            labelled = ensure_labels(self.out / LABELS, data.labels.repeat(self.copies), data.num_classes)
            files = {name: ArrayFile(self.out / name, shape, folder.settings) for name in names}
            if as_recorded and all(file.whole for file in files.values()):
                done = "nothing to do" if labelled else f"{LABELS} was missing and is written again"
                said = f"{self.out} is complete: {done}"
            else:
                rows = sum(file.rows for file in files.values())
                if rows:
                    self.console.print(f"going on after {rows} images", markup=False)
                found, summary = write(files)
                about = {"settings": folder.settings, "environment": environment()}
                write_json(self.out / RECORD, {"format": self.kind, "images": len(data), **found, **about})
                said = f"{self.out}: {summary}"
            folder.finish()
        self.console.print(said, markup=False)

    def fill(
        self, files: Files, produce: Callable[[str, int], np.ndarray], note: Callable[[], str] = str
    ) -> tuple[int, float]:
        """Write what is missing, and give how many images that were, and how many a second.

        `produce` makes a batch of a file from a row on, and `note` is shown beside the progress.
        """
        there = sum(file.rows for file in files.values())
        written, rate, started = 0, 0.0, time.monotonic()

        def produce_and_show(name: str, start: int) -> np.ndarray:
            nonlocal written, rate
            pixels = produce(name, start)
            written += len(pixels)
            rate = written / (time.monotonic() - started)
            progress.update(task, advance=len(pixels), rate=rate, note=note())
            return pixels

        shown = "{task.fields[rate]:.1f} images/s{task.fields[note]}"
        with signals_noted(self.console) as noted, image_progress(self.console, shown) as progress:
            total = sum(file.shape[0] for file in files.values())
            task = progress.add_task("", total=total, completed=there, rate=0.0, note=note())
            for number, (name, file) in enumerate(files.items(), 1):
                progress.update(task, description=f"{file.path.stem}, file {number} of {len(files)}")
                file.fill(partial(produce_and_show, name), noted)
        return written, rate
