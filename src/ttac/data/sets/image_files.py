"""Image files with labels, decoded when they are read: class folders, list files, splits and corruptions in folders."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ttac.common.files import text_hash
from ttac.common.lookup import pick
from ttac.data.corruptions.constants import SEVERITIES
from ttac.data.folder import check_shape, image_size, labels_by_subfolder, list_images, read_levels
from ttac.data.labelled import LabelledImages
from ttac.data.sets.layout import MAX_CLASSES, Layout, Wanted, at_or_below, check_count

LIST = "image_list.txt"  # VisDA's name for a list of files and labels
TRAIN = "train"
# Data sets that have both keep the labels of the test images for themselves.
HELD_OUT = ("validation", "val", "test")
HASHED_BYTES = 2**30  # of a listing's files together
GROUPS = ("noise", "blur", "weather", "digital", "extra")  # archives of ImageNet-C


@dataclass(frozen=True)
class Listing:
    """Image files of a folder with their labels; none is opened yet."""

    folder: Path
    files: Sequence[str]
    labels: Sequence[int]
    num_classes: int
    classes: tuple[str, ...] | None

    def load(self, wanted: Wanted) -> LabelledImages:
        """Take the images, made to the wanted size when they are read."""
        folder, files = self.folder, self.files
        size = wanted.size or (None if wanted.spec is None else wanted.spec.size)
        channels, crop_pct = wanted.channels, wanted.crop_pct
        expected = size or image_size(folder, files)

        def decode(name: str) -> Tensor:
            image = read_levels(folder / name, size, channels, crop_pct)
            check_shape(name, image, expected)
            return image

        def read(rows: Tensor) -> Tensor:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                return torch.stack(list(pool.map(decode, [files[row] for row in rows.tolist()])))

        fingerprint = text_hash([f"{expected} {channels} {crop_pct} {self.classes!a}", *self._contents()])
        labels = torch.tensor(self.labels)
        return LabelledImages(read, labels, self.num_classes, channels, expected, fingerprint, self.classes)

    def _contents(self) -> list[str]:
        """Describe each file for the fingerprint: name, label and hash of the content.

        Where hashing would take long, size and time of the last change stand for the content: a copy of the files is
        then taken for other data, and a change that restores the time is not noticed.
        """
        paths = [self.folder / name for name in self.files]
        known = [path.stat() for path in paths]
        if sum(one.st_size for one in known) <= HASHED_BYTES:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                marks = list(pool.map(lambda path: hashlib.sha256(path.read_bytes()).hexdigest(), paths))
        else:
            marks = [f"{one.st_size} {one.st_mtime_ns}" for one in known]
        return [f"{name!a} {label} {mark}" for name, label, mark in zip(self.files, self.labels, marks, strict=True)]


def list_classes(folder: Path, wanted: Wanted, part: str = "") -> Listing:
    """List a folder with one subfolder a class, numbered in the order of their names."""
    files = list_images(folder, broken_links=False)
    found, spec = tuple(sorted({name.partition("/")[0] for name in files if "/" in name})), wanted.spec
    there = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    without = [name for name in there if name not in found]
    if without and wanted.classes is None:  # which would give the others their numbers
        raise ValueError(f"{folder}: no image is read from {', '.join(without[:5])}: remove empty folders, copy links")
    classes = wanted.classes or (None if spec is None else spec.classes) or found
    if spec is not None and len(classes) != spec.num_classes:
        raise ValueError(f"{folder} has {len(classes)} class subfolders, {spec.name} has {spec.num_classes} classes")
    check_count(spec, part, len(files), folder)
    try:
        by_name = labels_by_subfolder(files, len(classes), classes)
    except ValueError as error:
        hint = "" if spec is None else f" (or {LIST} in it, with paths and labels, is missing)"
        raise ValueError(f"{folder}: {error}{hint}") from error
    return Listing(folder, files, [by_name[name] for name in files], len(classes), classes)


def list_part(path: Path, wanted: Wanted, part: str = "") -> Listing:
    """List the images of a list file, or of a folder by its list file, or by its class folders where it has none."""
    file = next((file for file in (path, path / LIST) if file.is_file()), None)
    if file is None:
        return list_classes(path, wanted, part)
    names = wanted.classes or (None if wanted.spec is None else wanted.spec.classes)
    files, labels = _parse_list(file, MAX_CLASSES if names is None else len(names))
    check_count(wanted.spec, part, len(files), file)
    return Listing(file.parent, files, labels, max(labels) + 1 if names is None else len(names), names)


def _parse_list(file: Path, num_classes: int) -> tuple[list[str], list[int]]:
    """Read lines of a path, relative to the list's own folder, and a label."""
    files, labels = [], []
    folders: dict[Path, bool] = {}  # whether they are inside, found out once for each
    inside = file.parent.resolve()
    for number, line in enumerate(_lines(file), 1):
        if not line.strip():
            continue
        name, _, label = line.strip().rpartition(" ")
        name = name.strip()
        if not name or not label.isascii() or not label.isdigit():
            raise ValueError(f"{file}, line {number}: expected a path and a label, not {line.strip()[:80]!r}")
        path = file.parent / name
        if path.parent not in folders:
            folders[path.parent] = path.parent.resolve().is_relative_to(inside)
        if not folders[path.parent] or (path.is_symlink() and not path.resolve().is_relative_to(inside)):
            raise ValueError(f"{file}, line {number}: {name} leads out of the list's folder")
        if not path.is_file():
            raise FileNotFoundError(f"{path}, line {number} of {file.name}, is missing")
        if len(label) > 9 or int(label) >= num_classes:
            raise ValueError(f"{file}, line {number}: label {label[:20]} is not in 0..{num_classes - 1}")
        files.append(name)
        labels.append(int(label))
    if not files:
        raise ValueError(f"{file} lists no images")
    return files, labels


def _lines(file: Path) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8-sig") as text:
            yield from text
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is neither a folder nor a list of images and labels: {error}") from error


def has_classes(folder: Path) -> bool:
    """Tell whether a folder holds images of several classes: a list, or subfolders that nobody is still writing."""
    if not folder.is_dir():
        return False
    if (folder / LIST).is_file():
        return True
    return any(entry.is_dir() and not entry.name.startswith(".") for entry in os.scandir(folder))


def split_folders(folder: Path) -> dict[str, Path]:
    """Give the folders of the train and the held-out images by name, where they are there."""
    return {name: folder / name for name in (TRAIN, *HELD_OUT) if has_classes(folder / name)}


def _splits(folder: Path) -> tuple[str, ...]:
    return tuple(dict.fromkeys(TRAIN if name == TRAIN else "test" for name in split_folders(folder)))


def _read_split(folder: Path, wanted: Wanted) -> LabelledImages:
    there = {name: place for name, place in split_folders(folder).items() if (name == TRAIN) == (wanted.split == TRAIN)}
    name = TRAIN if wanted.split == TRAIN else wanted.domain or next(iter(there))
    return list_part(pick(name, there, f"part of {folder}"), wanted, name).load(wanted)


def corruption_folders(folder: Path) -> dict[str, Path]:
    """Give the folders of an ImageNet-C by the name of the corruption: those that have a folder for a severity."""
    found: dict[str, Path] = {}
    for parent in (folder, *(folder / group for group in GROUPS)):
        if parent.is_dir():
            entries = sorted(Path(entry) for entry in os.scandir(parent) if entry.is_dir())
            found |= {
                entry.name: entry for entry in entries if any(has_classes(entry / str(level)) for level in SEVERITIES)
            }
    return found


def _read_corrupted(folder: Path, wanted: Wanted) -> LabelledImages:
    place = pick(wanted.domain or "", corruption_folders(folder), f"corruption in {folder}") / str(wanted.severity)
    if not place.is_dir():
        raise FileNotFoundError(f"no folder {place}")
    return list_classes(place, wanted, "test").load(wanted)


LAYOUTS = (
    Layout(
        "imagenet-c",
        "<corruption>/<severity>/<class>/ with images, also in folders noise, blur, weather, digital and extra",
        partial(at_or_below, is_there=corruption_folders),
        lambda folder: ("test",),
        _read_corrupted,
        domains=True,
        severities=True,
    ),
    Layout(
        "image-folders",
        "folders train and validation, val or test, each with one subfolder a class",
        partial(at_or_below, is_there=split_folders),
        _splits,
        _read_split,
        domains=True,
    ),
    Layout(
        "image-folders",
        "one subfolder a class, or a text file of paths and labels",
        lambda path, spec: path if spec is None or path.is_file() or has_classes(path) else None,
        lambda path: (),
        lambda path, wanted: list_part(path, wanted).load(wanted),
    ),
)
