"""CIFAR-10 and CIFAR-100 as published: pickles (python version) or records of bytes (binary version)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ttac.data.labelled import LabelledImages, from_tensors
from ttac.data.sets.layout import Layout, Wanted, at_or_below
from ttac.data.sets.pickles import load_plain
from ttac.data.sets.spec import DatasetSpec
from ttac.data.sets.specs import get_spec

_SPEC = get_spec("cifar10")  # CIFAR-100 has images of the same shape
SHAPE = (_SPEC.channels, *_SPEC.size)
PIXELS = math.prod(SHAPE)


@dataclass(frozen=True)
class Version:
    """The files of one version, and where the label is in them: under a key of a pickle, or at the end of a prefix."""

    holds: str
    files: dict[str, tuple[str, ...]]  # by split
    key: str = ""
    prefix: int = 0  # bytes of a record before the pixels, the last of which is the label; 0: pickles

    def there(self, folder: Path) -> bool:
        """Whether any of the files is in a folder."""
        return any((folder / name).is_file() for names in self.files.values() for name in names)


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
VERSIONS = (
    Version("cifar10", {"train": _BATCHES, "test": ("test_batch",)}, key="labels"),
    Version("cifar10", {"train": tuple(f"{name}.bin" for name in _BATCHES), "test": ("test_batch.bin",)}, prefix=1),
    Version("cifar100", {"train": ("train",), "test": ("test",)}, key="fine_labels"),
    Version("cifar100", {"train": ("train.bin",), "test": ("test.bin",)}, prefix=2),  # coarse and fine label
)


def read_file(path: Path, version: Version, count: int, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Read images `[count, 3, 32, 32]` and labels `[count]` of one file, or raise an error that names it."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    pixels, labels = _from_records(path, version.prefix) if version.prefix else _from_pickle(path, version.key)
    if len(pixels) != count or len(labels) != count:
        raise ValueError(f"{path} has {len(pixels)} images and {len(labels)} labels, expected {count}")
    if not 0 <= labels.min() <= labels.max() < num_classes:
        raise ValueError(f"{path}: labels must be in 0..{num_classes - 1}; got {labels.min()}..{labels.max()}")
    return pixels.reshape(count, *SHAPE), labels.astype(np.int64)


def _from_records(path: Path, prefix: int) -> tuple[np.ndarray, np.ndarray]:
    content = np.fromfile(path, np.uint8)
    if not len(content) or len(content) % (prefix + PIXELS):
        raise ValueError(f"{path} has {len(content)} bytes, which are not records of {prefix + PIXELS}: it is cut off")
    records = content.reshape(-1, prefix + PIXELS)
    return records[:, prefix:], records[:, prefix - 1]


def _from_pickle(path: Path, key: str) -> tuple[np.ndarray, np.ndarray]:
    content = load_plain(path)
    fields: dict[Any, Any] = content if isinstance(content, dict) else {}
    # Pickled by Python 2 the keys are text here; files that were written anew may have bytes.
    pixels, labels = (fields.get(name, fields.get(name.encode())) for name in ("data", key))
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != PIXELS:
        raise ValueError(f"{path} holds no uint8 images [N, {PIXELS}] under 'data'")
    # Lists within lists could become arrays of any size.
    if not isinstance(labels, list) or not labels or not all(type(label) is int for label in labels):
        raise ValueError(f"{path} holds no whole numbers under {key!r}")
    return np.asarray(pixels), np.array(labels)


def read_split(folder: Path, wanted: Wanted, version: Version) -> LabelledImages:
    """Read the train or test images; they are kept in memory, as pickles cannot be mapped."""
    spec = wanted.spec or get_spec(version.holds)
    split = wanted.split or ""
    names = version.files[split]
    each = spec.counts[split] // len(names)
    parts = [read_file(folder / name, version, each, spec.num_classes) for name in names]
    images, labels = (torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*parts, strict=True))
    return replace(from_tensors(images, labels, spec.num_classes), classes=wanted.classes or spec.classes)


def _find(path: Path, spec: DatasetSpec | None, version: Version) -> Path | None:
    return at_or_below(path, spec or get_spec(version.holds), version.there)


LAYOUTS = tuple(
    Layout(
        "cifar",
        ", ".join(name for names in version.files.values() for name in names),
        partial(_find, version=version),
        lambda folder: ("train", "test"),
        partial(read_split, version=version),
        holds=version.holds,
    )
    for version in VERSIONS
)
