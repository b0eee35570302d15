"""Blur: defocus, glass, motion, zoom and gaussian."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ttac.data.corruptions.draws import Draws
from ttac.data.corruptions.filters import clipped_zoom, cut_to_bytes, gaussian_filter, motion_blur_along

_LARGEST_TABLE = 1 << 16  # pixels that the zooms are tabulated for; each takes some 500 bytes


def gaussian_blur(images: Tensor, constants: tuple[float, ...], draws: Draws) -> Tensor:
    """Smooth by the sigma `constants[0]`: `[N, C, H, W] -> [N, C, H, W]`."""
    return gaussian_filter(images, constants[0])


def motion_blur(images: Tensor, constants: tuple[float, ...], draws: Draws) -> Tensor:
    """Blur along a line within 45 degrees of the horizontal: `[N, C, H, W] -> [N, C, H, W]`."""
    radius, sigma = constants
    angles = 90 * draws.uniform(1)[:, 0] - 45
    return (255 * motion_blur_along(images, radius, sigma, angles)).round() / 255


def defocus_blur(images: Tensor, constants: tuple[float, ...], draws: Draws) -> Tensor:
    """Spread every pixel over a disk: `[N, C, H, W] -> [N, C, H, W]`."""
    kernel = disk(*constants).to(images)
    channels = images.shape[1]
    padded = F.pad(images, [len(kernel) // 2] * 4, mode="reflect")
    return F.conv2d(padded, kernel.expand(channels, 1, -1, -1), groups=channels)


@lru_cache(maxsize=16)
def disk(radius: float, sigma: float) -> Tensor:
    """Draw a disk whose edge is smoothed by `sigma`, without the zeros around it: `[side, side]`.

    >>> disk(0.3, 0.4)
    tensor([[0.0016, 0.0371, 0.0016],
            [0.0371, 0.8450, 0.0371],
            [0.0016, 0.0371, 0.0016]])
    """
    # The grid ends where a disk of 8 pixels or more does, and then its edge is smoothed by a mirror image of itself.
    reach, smooth = (8, 1) if radius <= 8 else (math.ceil(radius), 2)
    axis = torch.arange(-reach, reach + 1)
    sharp = (axis[:, None] ** 2 + axis**2 <= radius**2).double()
    weights = torch.exp(-0.5 * (torch.arange(-smooth, smooth + 1) / sigma).double() ** 2)
    weights /= weights.sum()
    padded = F.pad((sharp / sharp.sum())[None, None], [smooth] * 4, mode="reflect")
    kernel = F.conv2d(padded, weights.outer(weights)[None, None])[0, 0]
    inside = axis[kernel.amax(1) > 1e-9].amax()
    return kernel[reach - inside : reach + inside + 1, reach - inside : reach + inside + 1].float()


def zoom_blur(images: Tensor, constants: tuple[float, ...], draws: Draws) -> Tensor:
    """Average the image and its zooms by factors from 1 to `constants[0]` in steps of `constants[1]`."""
    factors = (1.0, *np.arange(1, *constants).tolist())
    height, width = images.shape[-2:]
    if height * width > _LARGEST_TABLE:
        return sum((clipped_zoom(images, factor) for factor in factors), torch.zeros_like(images)) / len(factors)
    read, weights, starts = (part.to(images.device) for part in zoom_table(height, width, factors))
    # Every image's pixel is made up of the same few others: a bag of rows of the pixels' table [H W, N C].
    pixels = images.reshape(-1, height * width).T.contiguous()
    blurred = F.embedding_bag(read, pixels, starts, mode="sum", per_sample_weights=weights)
    return blurred.T.contiguous().view(images.shape)


@lru_cache(maxsize=8)
def zoom_table(height: int, width: int, factors: tuple[float, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """List the pixels that make up each pixel of the mean of zooms, their weights, and where each one's part starts.

    >>> read, weights, starts = zoom_table(8, 8, (1.0, 1.0))
    >>> read[starts[9]], weights[starts[9]]
    (tensor(9), tensor(1.))
    """
    indices, values = zip(*(_zoom_entries(height, width, factor) for factor in factors), strict=True)
    mean = torch.cat(values) / len(factors)
    total = torch.sparse_coo_tensor(torch.cat(indices, 1), mean, check_invariants=False).coalesce()
    written, read = total.indices()
    sizes = written.bincount()
    return read, total.values().float(), sizes.cumsum(0) - sizes


def _zoom_entries(height: int, width: int, factor: float) -> tuple[Tensor, Tensor]:
    """Write a zoom as a sparse matrix: its (written, read) pixels `[2, entries]` and values `[entries]`."""
    # It is the Kronecker product of a matrix for each axis, whose columns are the zoomed unit vectors.
    down, across = (
        clipped_zoom(torch.eye(side, dtype=torch.float64).view(side, 1, 1, side), factor).view(side, side).T
        for side in (height, width)
    )
    rows, columns = down.nonzero().T, across.nonzero().T  # [2, entries of an axis]
    indices = width * rows[:, :, None] + columns[:, None]
    return indices.flatten(1), torch.outer(down[tuple(rows)], across[tuple(columns)]).flatten()


def glass_blur(images: Tensor, constants: tuple[float, ...], draws: Draws) -> Tensor:
    """Smooth, let pixels take others' places nearby, and smooth again: `[N, C, H, W] -> [N, C, H, W]`."""
    sigma, times = constants[0], int(constants[2])
    reach = max(1, round(constants[1]))
    height, width = images.shape[-2:]
    smooth = cut_to_bytes(gaussian_filter(images, sigma)).to(images.dtype).div_(255)
    # One number is enough for two displacements: the whole and the fraction of it.
    drawn = 2 * reach * draws.uniform(times, height - 2 * reach, width - 2 * reach)
    down = drawn.floor()
    across = drawn.sub_(down).mul_(2 * reach).floor_()
    shifts = down.mul_(width).add_(across).sub_(reach * (width + 1))
    taken = glass(shifts, reach, height, width)[:, None].expand(-1, images.shape[1], -1)
    return gaussian_filter(smooth.flatten(2).gather(2, taken).view_as(images), sigma)


def glass(shifts: Tensor, reach: int, height: int, width: int) -> Tensor:
    """Give the place `[N, H W]`, in row-major order, that each pixel takes its value from.

    In each of several rounds, the pixels of the interior, from its last row and column to its first, take what is at
    (dy, dx) of them just then, both from -reach to reach - 1: `shifts [N, rounds, H - 2 reach, W - 2 reach]` holds
    W dy + dx, in floats. The published generator means to swap the two pixels; but its second assignment writes back
    what the first has just copied, so it copies.

    >>> glass(torch.full((1, 1, 2, 2), -5.0), 1, 4, 4).view(4, 4)  # (-1, -1) everywhere
    tensor([[ 0,  1,  2,  3],
            [ 4,  5,  6,  7],
            [ 8,  9,  5,  6],
            [12, 13,  9, 10]])
    """
    order, written, steps = _glass_plan(reach, height, width, shifts.shape[1])
    order, written = order.to(shifts.device), written.to(shifts.device)
    # With the samples last, rows are copied. Floats, exact up to 2^24 pixels, are several times faster than integers.
    read = shifts.flatten(1).T.contiguous().index_select(0, order).add_(written[:, None]).long()
    taken = torch.arange(height * width, device=shifts.device)[:, None].repeat(1, len(shifts))
    for places, sources in zip(written.split(steps), read.split(steps), strict=True):
        taken.index_copy_(0, places, taken.gather(0, sources))
    return taken.T


@lru_cache(maxsize=8)
def _glass_plan(reach: int, height: int, width: int, rounds: int) -> tuple[Tensor, Tensor, list[int]]:
    """Group the copies into steps, each of copies that can be made at once: their order, places, numbers by step.

    A step reads before it writes. So a copy must come in a later step than those of the pixels it may read whose turn
    was before, and in no later step than the others. At the time -x - (reach + 1) y it does: at (dy, dx) of a pixel the
    time differs by -dx - (reach + 1) dy, which is below 0 where the turn was before (dy > 0, or dy = 0 and dx > 0) and
    above 0 elsewhere. The next round starts later by more than the largest of these differences, reach (reach + 2).
    With a reach of 1 no turn of a pixel that is read was before, so that a whole round is one step.
    """
    y, x = torch.meshgrid(
        torch.arange(reach + 1, height - reach + 1), torch.arange(reach + 1, width - reach + 1), indexing="ij"
    )
    times, delay = (-x - (reach + 1) * y, reach * (reach + 2) + 1) if reach > 1 else (torch.zeros_like(x), 1)
    times = torch.cat([times.flatten() + delay * turn for turn in range(rounds)])
    times, order = times.sort(stable=True)
    places = (width * y + x).flatten().repeat(rounds)[order]
    return order, places, times.unique_consecutive(return_counts=True)[1].tolist()
