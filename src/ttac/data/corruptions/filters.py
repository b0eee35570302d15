"""Filters that several corruptions share, for a whole batch and on any device."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Border = Literal["nearest", "reflect"]


def cut_to_bytes(images: Tensor) -> Tensor:
    """Clip to [0, 1] and cut fractions of the 8-bit levels off, into uint8 of the same shape.

    >>> cut_to_bytes(torch.tensor([-0.1, 1.9 / 255, 3.0 / 255, 1.1]))
    tensor([  0,   1,   3, 255], dtype=torch.uint8)
    """
    # Where a filter leaves a level as it was, single precision must not take a whole one away. It is wrong by less than
    # this. More would keep levels that faint neighbours do pull down: one of them, at a sigma of 0.25, by 3e-4.
    return images.clamp(0, 1).mul_(255).add_(2e-4).byte()


@lru_cache(maxsize=64)
def gaussian_matrix(side: int, sigma: float, truncate: float, mode: Border) -> Tensor:
    """Write a Gaussian filter along an axis of `side` pixels as a matrix `[side, side]`, its border included.

    >>> gaussian_matrix(3, 0.0, 4.0, "nearest").equal(torch.eye(3))
    True
    """
    radius = int(truncate * sigma + 0.5)
    offsets = torch.arange(-radius, radius + 1)
    weights = torch.exp(-0.5 * (offsets / sigma if sigma else offsets).double() ** 2)
    read = torch.arange(side)[:, None] + offsets
    if mode == "nearest":
        read = read.clamp(0, side - 1)
    else:  # d c b a | a b c d | d c b a, as often as the radius asks for
        read = read % (2 * side)
        read = torch.minimum(read, 2 * side - 1 - read)
    matrix = torch.zeros(side, side, dtype=torch.float64)
    return matrix.scatter_add_(1, read, (weights / weights.sum()).expand(side, -1)).float()


def gaussian_filter(images: Tensor, sigma: float, *, truncate: float = 4.0, mode: Border = "nearest") -> Tensor:
    """Smooth `[N, C, H, W]`; the filter ends at `truncate` sigmas.

    The border is the edge repeated ("nearest") or mirrored with the edge twice ("reflect"), SciPy's names for them.

    >>> gaussian_filter(torch.eye(3)[None, None], 0.4)[0, 0, 1]
    tensor([0.0759, 0.8482, 0.0759])
    """
    down, across = (gaussian_matrix(side, sigma, truncate, mode).to(images) for side in images.shape[-2:])
    return down @ (images @ across.T)


def clipped_zoom(images: Tensor, factor: float) -> Tensor:
    """Enlarge the middle of `[N, C, H, W]` by `factor` and cut it to the size that it had; below 1 change nothing.

    The corners of the part that is enlarged stay corners, as in SciPy's `zoom`. The part and the result are whole
    pixels, so the factor that comes about is near `factor`, along each axis on its own.

    >>> clipped_zoom(torch.arange(16.0).view(1, 1, 4, 4), 2.0)[0, 0, 0]
    tensor([5.0000, 5.3333, 5.6667, 6.0000])
    """
    factor = max(factor, 1)
    parts = [math.ceil(side / factor) for side in images.shape[-2:]]
    sizes = [round(part * factor) for part in parts]
    part = _middle(images, parts)
    return _middle(F.interpolate(part, size=sizes, mode="bilinear", align_corners=True), list(images.shape[-2:]))


def _middle(images: Tensor, size: list[int]) -> Tensor:
    top, left = ((have - want) // 2 for have, want in zip(images.shape[-2:], size, strict=True))
    return images[..., top : top + size[0], left : left + size[1]]


_FAINTEST_TAP = 1e-6  # of the whole: to leave forty such taps out moves a pixel by a hundredth of a level at most
_READ_AT_ONCE = 1 << 20  # pixels times taps, about what a cache of the CPU holds; a row of pixels at least


def motion_blur_along(images: Tensor, radius: float, sigma: float, angles: Tensor) -> Tensor:
    """Blur each of `[N, C, H, W]` along its own of `angles [N]`, in degrees, as ImageMagick does.

    Tap i of 2 ceil(radius) + 1, all on one side, has the weight exp(-i² / 2σ²) and reads the pixel next to
    (x + i cos a, y + i sin a); outside the image that is the nearest edge. ImageMagick rounds the result to levels,
    which is left to the caller.

    >>> motion_blur_along(torch.eye(3)[None, None], 1, 0.5, torch.tensor([0.0]))[0, 0, 1]
    tensor([0.1192, 0.8805, 0.0000])
    """
    # Double precision on the CPU, so that an offset of nearly a half goes the same way whatever the device.
    steps = torch.arange(2 * math.ceil(radius) + 1, dtype=torch.float64)
    weights = torch.exp(-0.5 * (steps / sigma) ** 2)
    weights = weights[weights >= _FAINTEST_TAP * weights.sum()]
    radians = torch.deg2rad(angles.cpu().double())[:, None]
    down, across = (
        torch.ceil(steps[: len(weights)] * part - 0.5).int().to(images.device)  # [N, taps]
        for part in (radians.sin(), radians.cos())
    )
    height, width = images.shape[-2:]
    at_once = _READ_AT_ONCE // len(weights)
    chunk = max(1, min(at_once // (height * width), len(images)))
    band = max(1, min(at_once // (chunk * width), height))
    weights = (weights / weights.sum()).to(images.device, images.dtype).repeat(chunk * band * width, 1)
    parts = zip(images.split(chunk), down.split(chunk), across.split(chunk), strict=True)
    return torch.cat([_weighted_sum(part, rows, columns, weights, band) for part, rows, columns in parts])


def _weighted_sum(images: Tensor, down: Tensor, across: Tensor, weights: Tensor, band: int) -> Tensor:
    """Add up shifted images: `[N, C, H, W]` by pixels `down [N, taps]` and `across [N, taps]`, `band` rows at a time.

    There is a row of `weights [at least N band W, taps]` for each pixel.
    """
    count, channels, height, width = images.shape

    def axis(side: int) -> Tensor:
        return torch.arange(side, dtype=torch.int32, device=images.device)[:, None]

    columns = (axis(width) + across[:, None]).clamp_(0, width - 1)  # [N, W, taps]
    rows = (axis(height) + down[:, None]).clamp_(0, height - 1) + height * axis(count)[:, None]  # [N, H, taps]
    # A weighted sum of rows of a table is an embedding bag. The table's rows are pixels here.
    pixels = images.permute(0, 2, 3, 1).flatten().view(-1, channels)  # a column of its own strides would be slow
    total = images.new_empty(count, height, width, channels)
    for part, result in zip((width * rows).split(band, 1), total.split(band, 1), strict=True):
        bags = (part[:, :, None] + columns[:, None]).flatten(0, 2)  # of [N, band, W, taps]
        bagged = F.embedding_bag(bags, pixels, mode="sum", per_sample_weights=weights[: len(bags)])
        result.copy_(bagged.view_as(result))
    return total.permute(0, 3, 1, 2).contiguous()
