"""Images with labels, read by row from wherever they are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ttac.common.files import text_hash
from ttac.model.inputs import check_labels

CHUNK = 1024
KEPT_BYTES = 2**30


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

    @property
    def kind(self) -> str:
        """What the images are like, in words."""
        return f"{self.channels} x {self.size[0]} x {self.size[1]} of {self.num_classes} classes"

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all images in order, `[n, C, H, W]` in [0, 1], with their labels."""
        for rows in torch.arange(len(self)).split(size):
            yield self.read(rows).float() / 255, self.labels[rows]

    def subset(self, rows: Tensor) -> LabelledImages:
        """Keep some rows, in their order."""
        return replace(
            self,
            read=lambda chosen: self.read(rows[chosen]),
            labels=self.labels[rows],
            fingerprint=text_hash([self.fingerprint, hash_of([rows.numpy()])]),
        )

    def in_memory(self) -> LabelledImages:
        """Read all images now and keep them, for readers that come back often, where they take no more than a GiB.

        >>> data = from_tensors(torch.zeros(3, 3, 8, 8, dtype=torch.uint8), torch.zeros(3).long(), 1)
        >>> data.in_memory().read(torch.tensor([2])).shape
        torch.Size([1, 3, 8, 8])
        """
        if len(self) * self.channels * self.size[0] * self.size[1] > KEPT_BYTES:
            return self
        pixels = torch.cat([self.read(rows) for rows in torch.arange(len(self)).split(CHUNK)])
        return replace(self, read=lambda rows: pixels[rows])

    def some(self, count: int | None) -> LabelledImages:
        """Keep `count` images in their order, or all: chosen at random, as the first ones may be of one class alone.

        They are the same ones each time.

        >>> data = from_tensors(torch.zeros(3, 3, 8, 8, dtype=torch.uint8), torch.zeros(3).long(), 1)
        >>> len(data.some(2)), len(data.some(None))
        (2, 3)
        """
        if count is None:
            return self
        if not 1 <= count <= len(self):
            raise ValueError(f"{count} images are wanted, and there are {len(self)}")
        chosen = torch.randperm(len(self), generator=torch.Generator().manual_seed(0))[:count]
        return self.subset(chosen.sort().values)

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
    fingerprint = hash_of([images.numpy(), labels.numpy()])
    return LabelledImages(
        lambda rows: images[rows], labels, num_classes, channels, (height, width), fingerprint, flip=flip
    )


def hash_of(arrays: Sequence[np.ndarray]) -> str:
    """Hash what arrays hold, which may be mapped files.

    >>> hash_of([np.zeros(2)]) == hash_of([np.zeros(3)])
    False
    """
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape}".encode())
        for start in range(0, len(array), CHUNK):
            digest.update(array[start : start + CHUNK].tobytes())
    return digest.hexdigest()[:16]
