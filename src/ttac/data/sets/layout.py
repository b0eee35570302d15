"""How data sets lie on disk: what a reader of one kind of files is asked for, and what it tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ttac.data.labelled import LabelledImages
from ttac.data.sets.spec import DatasetSpec, LayoutKind

MAX_CLASSES = 1_000_000  # where the labels alone tell how many there are


@dataclass(frozen=True)
class Wanted:
    """Which part of a data set is to be read, and how image files are to come."""

    spec: DatasetSpec | None = None
    split: str | None = None
    domain: str | None = None
    severity: int | None = None
    size: tuple[int, int] | None = None  # height, width
    channels: int = 3
    crop_pct: float = 1.0
    classes: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Layout:
    """A kind of files that is recognised by their names."""

    kind: LayoutKind
    expects: str  # for messages
    find: Callable[[Path, DatasetSpec | None], Path | None]  # where the files are, at or just below a path
    splits: Callable[[Path], tuple[str, ...]]  # parts that are kept apart; none where all is one part
    read: Callable[[Path, Wanted], LabelledImages]
    holds: str | None = None  # the data set, where the names of the files tell
    domains: bool = False
    severities: bool = False


def at_or_below(path: Path, spec: DatasetSpec | None, is_there: Callable[[Path], object]) -> Path | None:
    """Look into a folder, and into those of the data set's usual names below it."""
    below = () if spec is None else spec.folders
    return next((place for place in (path, *(path / name for name in below)) if is_there(place)), None)


def check_count(spec: DatasetSpec | None, part: str, count: int, where: Path) -> None:
    """Raise an error where a data set of a name does not have all its images: results of its name would be others."""
    if spec is not None and spec.counts.get(part, count) != count:
        wrong = f"{where} has {count} images, {spec.name} has {spec.counts[part]}: it is not whole or something else"
        raise ValueError(f"{wrong}; give the path without the name to use it as it is")
