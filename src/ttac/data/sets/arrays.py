"""Images and labels in `.npy` files, mapped into memory: pairs, CIFAR-C's arrays and CIFAR-10.1."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ttac.common.lookup import pick
from ttac.data.corruptions.constants import SEVERITIES
from ttac.data.labelled import LabelledImages, hash_of
from ttac.data.sets.layout import MAX_CLASSES, Layout, Wanted, at_or_below, check_count
from ttac.data.sets.specs import get_spec
from ttac.model.inputs import check_labels

SPLITS = ("train", "test")
VERSIONS = get_spec("cifar10.1").domains  # the authors recommend the first


def load_array(path: Path) -> np.ndarray:
    """Map an array, or raise an error that names the file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(Path(folder, "a.npy"), np.arange(3))
    ...     load_array(Path(folder, "a.npy")).tolist()
    [0, 1, 2]
    """
    try:
        with np.errstate(over="raise"):  # of a product of lengths
            return np.lib.format.open_memmap(path, mode="r")
    except OSError:  # names the file itself
        raise
    except Exception as error:  # a damaged or forged header fails wherever it likes
        raise ValueError(f"{path} is not a readable array: {error}") from error


def from_arrays(images_file: Path, labels_file: Path, wanted: Wanted, part: str) -> LabelledImages:
    """Take images `[N, H, W, C]` and labels `[N]`, of one severity where one is wanted; a batch alone is in memory.

    With severities, both hold the five of them one after the other, or the labels those of one, which are of all.
    """
    images, labels = load_array(images_file), load_array(labels_file)
    names, spec = wanted.classes, wanted.spec
    if images.dtype != np.uint8 or images.ndim != 4 or 0 in images.shape:
        raise ValueError(f"{images_file} has {images.dtype} {images.shape}; expected uint8 [N, H, W, C]")
    if spec is not None and images.shape[1:] != (*spec.size, spec.channels):
        raise ValueError(f"{images_file} has images {images.shape[1:]}, {spec.name} {(*spec.size, spec.channels)}")
    if wanted.severity is not None and len(images) % len(SEVERITIES):
        raise ValueError(f"{images_file} has {len(images)} images, which are not {len(SEVERITIES)} severities")
    if wanted.severity is not None and labels.ndim == 1 and len(SEVERITIES) * len(labels) == len(images):
        labels = np.tile(labels, len(SEVERITIES))
    if labels.dtype.kind not in "iu" or labels.shape != (len(images),):
        raise ValueError(f"{labels_file} has {labels.dtype} {labels.shape}; expected {len(images)} integers")
    if names is None and spec is not None:
        names = spec.classes
    count = int(labels.max()) + 1 if names is None else len(names)
    if count > MAX_CLASSES:
        raise ValueError(f"{labels_file} has the label {count - 1}, which must be below {MAX_CLASSES}")
    if wanted.severity is not None:
        place, each = SEVERITIES.index(wanted.severity), len(images) // len(SEVERITIES)
        rows = slice(place * each, (place + 1) * each)
        images, labels = images[rows], labels[rows]
    check_count(spec, part, len(images), images_file)
    _, height, width, channels = images.shape

    def read(chosen: Tensor) -> Tensor:
        return torch.from_numpy(images[chosen.numpy()]).permute(0, 3, 1, 2).contiguous()

    try:
        truth = check_labels(np.array(labels, dtype=np.int64), len(images), count)
    except ValueError as error:
        raise ValueError(f"{labels_file}: {error}") from error
    return LabelledImages(read, truth, count, channels, (height, width), hash_of([images, labels]), names)


def _splits(folder: Path) -> tuple[str, ...]:
    return tuple(split for split in SPLITS if (folder / f"{split}_images.npy").is_file())


def _read_split(folder: Path, wanted: Wanted) -> LabelledImages:
    split = wanted.split or ""
    return from_arrays(folder / f"{split}_images.npy", folder / f"{split}_labels.npy", wanted, split)


def corruptions_in(folder: Path) -> dict[str, Path]:
    """Give the arrays of a folder in CIFAR-C's form by the name of the corruption; none where it is not of that form.

    >>> corruptions_in(Path("nowhere"))
    {}
    """
    if not (folder / "labels.npy").is_file() or (folder / "images.npy").is_file():
        return {}
    # Names with a dot in front are files that somebody is still writing.
    files = sorted(file for file in folder.glob("*.npy") if not file.name.startswith("."))
    return {file.stem: file for file in files if file.stem != "labels"}


def _read_corrupted(folder: Path, wanted: Wanted) -> LabelledImages:
    images = pick(wanted.domain or "", corruptions_in(folder), f"corruption in {folder}")
    return from_arrays(images, folder / "labels.npy", wanted, "test")


def new_test_files(folder: Path, version: str) -> tuple[Path, Path]:
    """Name the images and the labels of a version of CIFAR-10.1."""
    return folder / f"cifar10.1_{version}_data.npy", folder / f"cifar10.1_{version}_labels.npy"


def _read_new_test(folder: Path, wanted: Wanted) -> LabelledImages:
    version = wanted.domain or VERSIONS[0]
    known = {version: new_test_files(folder, version) for version in VERSIONS}
    return from_arrays(*pick(version, known, "version of CIFAR-10.1"), wanted, version)


LAYOUTS = (
    Layout(
        "cifar10.1",
        "cifar10.1_v6_data.npy and cifar10.1_v6_labels.npy, or those of v4",
        partial(at_or_below, is_there=lambda folder: any(new_test_files(folder, v)[0].is_file() for v in VERSIONS)),
        lambda folder: ("test",),
        _read_new_test,
        holds="cifar10.1",
        domains=True,
    ),
    Layout("arrays", "{train,test}_{images,labels}.npy", partial(at_or_below, is_there=_splits), _splits, _read_split),
    Layout(
        "array-pair",
        "images.npy and labels.npy",
        lambda path, spec: path if (path / "images.npy").is_file() and (path / "labels.npy").is_file() else None,
        lambda folder: (),
        lambda folder, wanted: from_arrays(folder / "images.npy", folder / "labels.npy", wanted, ""),
    ),
    Layout(
        "cifar-c",
        "labels.npy and one .npy for each corruption",
        partial(at_or_below, is_there=corruptions_in),
        lambda folder: ("test",),
        _read_corrupted,
        domains=True,
        severities=True,
    ),
)
