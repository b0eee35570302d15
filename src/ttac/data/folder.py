"""Images from a folder, in the order of their names."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm"))
# Others stay closed: Pillow would run Ghostscript on an EPS file, whatever its name.
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF", "PPM")
MAX_PIXELS = 2**26

Report = Callable[[str, str], None]  # file, reason


class UnreadableImageError(ValueError):
    """A file is not an image that can be used; the message is the reason."""


def list_images(folder: Path | str, broken_links: bool = True) -> list[str]:
    """List the images below `folder`, sorted; hidden ones and links that lead out of it are left out.

    Links to nothing, or in a circle, are listed, for readers to skip with a reason, unless `broken_links` is False.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Image.new("RGB", (2, 2)).save(Path(folder) / "b.PNG")
    ...     list_images(folder)
    ['b.PNG']
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    inside = folder.resolve()
    below = list(_images_below(folder))
    # Folders that are links are not walked into, so a file leads out only where it is one itself.
    found = [name for name, is_link in below if not is_link or _usable_link(folder / name, inside, broken_links)]
    if not found:
        reason = f"; {len(below)} links lead out of it" if below else ""
        raise ValueError(f"no image in {folder} ({', '.join(sorted(SUFFIXES))}){reason}")
    return sorted(found)


def _images_below(folder: Path | str, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Yield names of image files, and whether each is a link; plain texts, as there may be a million."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):  # checkpoints of notebooks and marks of other systems are no images
                continue
            name = f"{prefix}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                yield from _images_below(entry.path, f"{name}/")
            elif Path(entry.name).suffix.lower() in SUFFIXES:
                is_link = entry.is_symlink()
                if is_link or entry.is_file():
                    yield name, is_link


def _usable_link(link: Path, inside: Path, broken_links: bool) -> bool:
    """Tell whether a link is of a file in the folder `inside`; `broken_links` is for those that are of none at all."""
    try:
        target = link.resolve(strict=True)
    except FileNotFoundError:
        return broken_links and link.resolve().is_relative_to(inside)
    except (OSError, RuntimeError):  # a circle; the latter before Python 3.13
        return broken_links
    return target.is_relative_to(inside) and target.is_file()


def file_bytes(path: Path) -> int | None:
    """Give the size of a file, None where it cannot be looked at, such as a link to nothing."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def labels_by_subfolder(files: Sequence[str], num_classes: int, classes: Sequence[str] | None) -> dict[str, int]:
    """Label each file by its first subfolder: its place among the class names, or among the sorted subfolders.

    >>> labels_by_subfolder(["cat/1.png", "ant/2.png"], 2, None)
    {'cat/1.png': 1, 'ant/2.png': 0}
    """
    flat = [name for name in files if "/" not in name]
    if flat:
        raise ValueError(f"{len(flat)} images are in no class subfolder ({', '.join(flat[:3])}): put each into one")
    folders = {name: name.split("/")[0] for name in files}
    found = sorted(set(folders.values()))
    if classes is None:
        classes = found
        if len(found) != num_classes:
            raise ValueError(
                f"there are {len(found)} class subfolders, the model has {num_classes} classes: name its classes, or "
                "group by prediction"
            )
    numbers = {name: number for number, name in enumerate(classes)}
    unknown = [name for name in found if name not in numbers]
    if unknown:
        raise ValueError(f"subfolders that are no class of the model: {', '.join(unknown[:5])}")
    if len(numbers) != len(classes):
        raise ValueError("two classes of the model have one name, so subfolders cannot tell them apart")
    return {name: numbers[folder] for name, folder in folders.items()}


def image_size(folder: Path, files: Sequence[str]) -> tuple[int, int]:
    """Give height and width of the first image that can be opened."""
    for name in files:
        try:
            with opened_image(folder / name) as image:
                return image.height, image.width
        except UnreadableImageError as error:
            reason = error
    raise ValueError(f"none of {len(files)} images can be read; {name}: {reason}")


def opened_image(
    source: Path | IO[bytes], max_pixels: int = MAX_PIXELS, formats: tuple[str, ...] = FORMATS
) -> Image.Image:
    """Open an image, from a file or from its bytes, and read its header alone."""
    try:
        image = Image.open(source, formats=formats)
    except UnidentifiedImageError as error:
        raise UnreadableImageError(f"not an image of {', '.join(formats)}") from error
    except Exception as error:  # decoders raise all kinds of errors on damaged files
        reason = getattr(error, "strerror", None)  # of the system, such as that a link leads nowhere
        raise UnreadableImageError(reason or f"{type(error).__name__}: {error}") from error
    if image.width * image.height > max_pixels:
        image.close()
        raise UnreadableImageError(f"{image.width} x {image.height} pixels are more than {max_pixels}")
    return image


def read_image(path: Path, size: tuple[int, int] | None, channels: int, crop_pct: float = 1.0) -> Tensor:
    """Read one image, resized and cropped around its centre to `size`, as `[C, H, W]` in [0, 1]."""
    with opened_image(path) as image:
        return image_pixels(image, size, channels, crop_pct)


def read_levels(path: Path, size: tuple[int, int] | None, channels: int, crop_pct: float = 1.0) -> Tensor:
    """Read one image as `read_image` does, in uint8; where that fails, the error names the file."""
    try:
        return (255 * read_image(path, size, channels, crop_pct)).round_().byte()
    except UnreadableImageError as error:
        raise ValueError(f"{path} cannot be read ({error}): remove it, or get it again") from error


def image_pixels(
    image: Image.Image,
    size: tuple[int, int] | None,
    channels: int,
    crop_pct: float = 1.0,
    max_pixels: int = MAX_PIXELS,
) -> Tensor:
    """Decode an opened image as `read_image` does, with at most `max_pixels` on the way."""
    try:
        image = _eight_bit(image).convert("L" if channels == 1 else "RGB")
        if size is not None:
            image = _resized(image, size, crop_pct, max_pixels)
    except Exception as error:  # decoders raise all kinds of errors on damaged files
        raise UnreadableImageError(f"{type(error).__name__}: {error}") from error
    pixels = torch.from_numpy(np.array(image)).reshape(image.height, image.width, -1)
    return pixels.permute(2, 0, 1).float() / 255


def check_shape(name: str, image: Tensor, expected: tuple[int, int]) -> None:
    """Raise an error where an image `[C, H, W]` has another height or width than the first one."""
    height, width = image.shape[1:]
    if (height, width) != expected:
        raise ValueError(
            f"{name} is {height} x {width}, the first image {expected[0]} x {expected[1]}: give the size to use "
            "(--size), and all are resized to it"
        )


@dataclass
class _Read:
    """What has been read of one batch, and of neighbours none of whose images can be."""

    next_batch: int
    images: list[Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    unreadable: list[tuple[str, str]] = field(default_factory=list)  # file, reason

    def join(self, later: _Read) -> None:
        self.next_batch = later.next_batch
        self.images += later.images
        self.names += later.names
        self.unreadable += later.unreadable


@dataclass
class FolderStream:
    """Batches `(images [N, C, H, W] in [0, 1], names)` from `next_batch` on, which moves along.

    Batches are cut by the place in `files`, so that a file that cannot be read leaves a gap in its own batch, and the
    rest is the same whether a stream is walked at once or goes on from `next_batch`. Each batch is given when the next
    one has been read, so that `is_last` tells of the one at hand whether images come after it. Without `size`, all
    images must have the size of the first.
    """

    folder: Path
    files: Sequence[str]
    batch: int
    size: tuple[int, int] | None
    channels: int
    crop_pct: float = 1.0
    unreadable: Report = lambda name, reason: None
    next_batch: int = 0
    is_last: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        if self.batch < 1:
            raise ValueError(f"batch must be at least 1, not {self.batch}")
        if self.channels not in (1, 3):
            raise ValueError(f"the model takes {self.channels} channels; image files give 1 or 3")

    def __iter__(self) -> Iterator[tuple[Tensor, list[str]]]:
        self.is_last = False
        expected = self.size or image_size(self.folder, self.files)
        first, end = self.next_batch, math.ceil(len(self.files) / self.batch)
        waiting = _Read(first)
        for number in range(first, end):
            read = self._read(number, expected)
            if waiting.images and read.images:
                self._pass(waiting)
                yield torch.stack(waiting.images), waiting.names
                waiting = read
            else:
                waiting.join(read)
        self.is_last = True
        self._pass(waiting)
        if waiting.images:
            yield torch.stack(waiting.images), waiting.names

    def _pass(self, read: _Read) -> None:
        for name, reason in read.unreadable:
            self.unreadable(name, reason)
        self.next_batch = read.next_batch

    def _read(self, number: int, expected: tuple[int, int]) -> _Read:
        found, start = _Read(number + 1), number * self.batch
        for name in self.files[start : start + self.batch]:
            try:
                image = read_image(self.folder / name, self.size, self.channels, self.crop_pct)
            except UnreadableImageError as error:
                found.unreadable.append((name, str(error)))
                continue
            check_shape(name, image, expected)
            found.images.append(image)
            found.names.append(name)
        return found


def _eight_bit(image: Image.Image) -> Image.Image:
    """Scale 16-bit greys, which Pillow would cut off at 255."""
    if image.mode.startswith("I"):
        pixels = np.asarray(image)
        if pixels.min() < 0 or pixels.max() > 65535:
            raise ValueError("pixels are not in 0..65535")
        return Image.fromarray(((pixels.astype(np.uint32) + 128) // 257).astype(np.uint8))  # 65535 is 255 * 257
    if image.mode == "F":
        raise ValueError("the range of floating-point pixels is not known")
    return image


def _resized(image: Image.Image, size: tuple[int, int], crop_pct: float, max_pixels: int) -> Image.Image:
    """Resize to cover `size / crop_pct`, and crop: the evaluation transform of timm and torchvision."""
    height, width = size
    over_height, over_width = math.floor(height / crop_pct), math.floor(width / crop_pct)
    if over_height * image.width >= over_width * image.height:
        new = over_height, max(int(over_height * image.width / image.height), width)
    else:
        new = max(int(over_width * image.height / image.width), height), over_width
    if new[0] * new[1] > max_pixels:
        raise ValueError(f"{image.width} x {image.height} pixels are too elongated")
    if new != (image.height, image.width):
        image = image.resize((new[1], new[0]), Image.Resampling.BICUBIC)
    top, left = round((new[0] - height) / 2), round((new[1] - width) / 2)
    return image.crop((left, top, left + width, top + height))
