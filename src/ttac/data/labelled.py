"""Images with labels for source training: in memory, in arrays on disk, or in a folder with one subfolder a class."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ttac.data.digits import load_digits
from ttac.data.folder import UnreadableImageError, image_size, labels_by_subfolder, list_images, read_image
from ttac.files import text_hash
from ttac.inputs import check_labels

DECODED_BYTES = 2**30  # a folder of images that takes no more than this is decoded once and kept
CHUNK = 1024


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """Images that are read by row, with their labels `[N]` in `0 .. num_classes - 1`."""

    read: Callable[[Tensor], Tensor]  # rows [n] -> uint8 [n, C, H, W]
    labels: Tensor
    num_classes: int
    channels: int
    size: tuple[int, int]  # height, width
    fingerprint: str
    classes: tuple[str, ...] | None = None
    flip: bool = True  # whether a mirrored image is still of its class

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all images in order, `[n, C, H, W]` in [0, 1], with their labels."""
        for rows in torch.arange(len(self)).split(size):
            yield self.read(rows).float() / 255, self.labels[rows]

    def subset(self, rows: Tensor) -> LabelledImages:
        """Keep some rows, in their order."""
        return replace(self, read=lambda chosen: self.read(rows[chosen]), labels=self.labels[rows])

    def split(self, share: float, seed: int) -> tuple[LabelledImages, LabelledImages]:
        """Split off a random share, which comes second.

        >>> data = from_tensors(torch.zeros(10, 3, 8, 8, dtype=torch.uint8), torch.zeros(10).long(), 1)
        >>> [len(part) for part in data.split(0.2, seed=0)]
        [8, 2]
        """
        if not 0 < share < 1:
            raise ValueError(f"the share split off must be between 0 and 1, not {share}")
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        rest = len(self) - max(1, round(share * len(self)))
        if rest < 1:
            raise ValueError(f"a share of {share} leaves nothing of {len(self)} images")
        return self.subset(order[:rest].sort().values), self.subset(order[rest:].sort().values)

    def pixel_moments(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Compute mean and standard deviation of each channel over all pixels, in [0, 1].

        >>> from_tensors(torch.full((2, 1, 8, 8), 255, dtype=torch.uint8), torch.zeros(2).long(), 1).pixel_moments()
        ((1.0,), (1.0,))
        """
        total = torch.zeros(2, self.channels, dtype=torch.float64)
        for rows in torch.arange(len(self)).split(CHUNK):
            pixels = self.read(rows).double().transpose(0, 1).flatten(1) / 255
            total += torch.stack([pixels.sum(1), pixels.square().sum(1)])
        mean, square = total / (len(self) * self.size[0] * self.size[1])
        std = (square - mean.square()).clamp(min=0).sqrt()
        std = torch.where(std > 1e-6, std, 1.0)  # a channel that never changes needs no scale
        return tuple(mean.tolist()), tuple(std.tolist())


def from_tensors(images: Tensor, labels: Tensor, num_classes: int, *, flip: bool = True) -> LabelledImages:
    """Take uint8 images `[N, C, H, W]` that are in memory.

    >>> len(from_tensors(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.zeros(4).long(), 2))
    4
    """
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise ValueError(f"images are {images.dtype} of shape {tuple(images.shape)}; expected uint8 [N, C, H, W]")
    _, channels, height, width = images.shape
    labels = check_labels(labels, len(images), num_classes)
    fingerprint = _hash_of([images.numpy(), labels.numpy()])
    return LabelledImages(
        lambda rows: images[rows], labels, num_classes, channels, (height, width), fingerprint, flip=flip
    )


def read_labelled(
    data: str,
    *,
    validation: bool = False,
    size: tuple[int, int] | None = None,
    channels: int = 3,
    crop_pct: float = 1.0,
    classes: Sequence[str] | None = None,
) -> LabelledImages | None:
    """Read `digits`, a folder with `{train,test}_{images,labels}.npy`, or a folder with one subfolder a class.

    With `validation`, give the part that the data set keeps apart for it, None where it does not. `size`, `channels`
    and `crop_pct` are for image files, which are made so.
    """
    names = None if classes is None else tuple(classes)
    if data == "digits":
        return _digits(validation)
    folder = Path(data)
    if (folder / "train_images.npy").is_file():
        split = "test" if validation else "train"
        return _arrays(folder, split, names) if (folder / f"{split}_images.npy").is_file() else None
    if validation:
        return None
    return _folder(folder, size, channels, crop_pct, names)


def _digits(validation: bool) -> LabelledImages:
    digits = load_digits()
    images, labels = (
        (digits.target_images, digits.target_labels) if validation else (digits.source_images, digits.source_labels)
    )
    # A mirrored digit is another sign.
    data = from_tensors((255 * images).round().byte(), labels, 10, flip=False)
    return replace(data, classes=tuple(map(str, range(10))))


def _arrays(folder: Path, split: str, classes: tuple[str, ...] | None) -> LabelledImages:
    """Map the arrays, so that only what a batch needs is in memory."""
    arrays = {}
    for part in ("images", "labels"):
        path = folder / f"{split}_{part}.npy"
        try:
            arrays[part] = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path} is not a readable array: {error}") from error
    images, labels = arrays["images"], arrays["labels"]
    if images.dtype != np.uint8 or images.ndim != 4 or not len(images):
        raise ValueError(f"{folder}: {split}_images are {images.dtype} {images.shape}; expected uint8 [N, H, W, C]")
    if not np.issubdtype(labels.dtype, np.integer) or labels.shape != (len(images),):
        raise ValueError(f"{folder}: {split}_labels are {labels.dtype} {labels.shape}; expected {len(images)} integers")
    count = int(labels.max()) + 1 if classes is None else len(classes)
    _, height, width, channels = images.shape

    def read(rows: Tensor) -> Tensor:
        return torch.from_numpy(images[rows.numpy()]).permute(0, 3, 1, 2).contiguous()

    truth = check_labels(np.array(labels, dtype=np.int64), len(images), count)
    return LabelledImages(read, truth, count, channels, (height, width), _hash_of([images, labels]), classes)


def _folder(
    folder: Path, size: tuple[int, int] | None, channels: int, crop_pct: float, classes: tuple[str, ...] | None
) -> LabelledImages:
    files = list_images(folder)
    flat = [name for name in files if "/" not in name]
    if flat:
        raise ValueError(
            f"{len(flat)} images of {folder} are in no class subfolder ({', '.join(flat[:3])}): "
            "put the images of each class into a subfolder of its name"
        )
    classes = classes or tuple(sorted({name.split("/")[0] for name in files}))
    by_name = labels_by_subfolder(files, len(classes), classes)
    expected = size or image_size(folder, files)

    def decode(name: str) -> Tensor:
        try:
            image = read_image(folder / name, size, channels, crop_pct)
        except UnreadableImageError as error:
            raise ValueError(f"{folder / name} cannot be read ({error}): remove it") from error
        if image.shape[1:] != expected:
            raise ValueError(
                f"{name} is {image.shape[1]} x {image.shape[2]}, the first image {expected[0]} x {expected[1]}: give "
                "the size to train with (--size), and all are resized to it"
            )
        return (255 * image).round().byte()

    def read(rows: Tensor) -> Tensor:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return torch.stack(list(pool.map(decode, [files[row] for row in rows.tolist()])))

    listing = [f"{name!a} {(folder / name).stat().st_size}" for name in files]
    data = LabelledImages(
        read,
        torch.tensor([by_name[name] for name in files]),
        len(classes),
        channels,
        expected,
        text_hash([f"{expected} {channels} {crop_pct}", *listing]),
        classes,
    )
    if len(files) * channels * expected[0] * expected[1] > DECODED_BYTES:
        return data
    pixels = torch.cat([read(rows) for rows in torch.arange(len(files)).split(CHUNK)])
    return replace(data, read=lambda rows: pixels[rows])


def _hash_of(arrays: Sequence[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape}".encode())
        for start in range(0, len(array), CHUNK):
            digest.update(array[start : start + CHUNK].tobytes())
    return digest.hexdigest()[:16]
