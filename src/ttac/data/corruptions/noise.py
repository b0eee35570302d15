"""Noise: gaussian, shot, impulse and speckle."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ttac.data.corruptions.draws import Draws

LEVELS = 256
_BALANCED = 1e-9  # what a column of an alias table may lack


def gaussian_noise(images: Tensor, constants: tuple[float, ...], draws: Draws) -> Tensor:
    """Add normal noise of the standard deviation `constants[0]`: `[N, C, H, W] -> [N, C, H, W]`."""
    return torch.add(images, draws.normal(*images.shape[1:]), alpha=constants[0])


def speckle_noise(images: Tensor, constants: tuple[float, ...], draws: Draws) -> Tensor:
    """Add normal noise in proportion to the value: `[N, C, H, W] -> [N, C, H, W]`."""
    return torch.addcmul(images, images, draws.normal(*images.shape[1:]), value=constants[0])


def impulse_noise(images: Tensor, constants: tuple[float, ...], draws: Draws) -> Tensor:
    """Set the share `constants[0]` of the values, each channel on its own, to 0 or to 1, half each."""
    half = constants[0] / 2
    drawn = draws.uniform(*images.shape[1:])
    return images.masked_fill(drawn < half, 0).masked_fill_(drawn >= 1 - half, 1)


def shot_noise(images: Tensor, constants: tuple[float, ...], draws: Draws) -> Tensor:
    """Count photons, Poisson distributed, of which white has `constants[0]` on average; more than that is white.

    A uniform number of 24 bits is all that a value takes, so that what is rarer than 1e-7 does not occur.
    """
    photons = int(constants[0])
    share, other = (table.to(images.device) for table in poisson_table(photons))
    place = draws.uniform(*images.shape[1:]).mul_(photons + 1)
    column = place.int()
    level = (images * (LEVELS - 1)).round_().int()
    entry = level.mul_(photons + 1).add_(column).flatten()
    kept = place.frac_().flatten() < share.index_select(0, entry)
    counts = torch.where(kept, column.flatten(), other.index_select(0, entry))
    return (counts / photons).view_as(images)


@lru_cache(maxsize=16)
def poisson_table(photons: int) -> tuple[Tensor, Tensor]:
    """Tabulate min(Poisson(level / 255 * photons), photons) for Walker's alias method, each `[256 (photons + 1)]`.

    Every level has a row of columns 0 ... photons. A column that is drawn uniformly counts itself with the probability
    of the first table, and else what the second one says.

    >>> share, other = poisson_table(1)
    >>> share[2 * 255]  # white has no photon with probability 1/e: column 0 is kept for 2/e
    tensor(0.7358)
    """
    rates = torch.linspace(0, photons, LEVELS, dtype=torch.float64)[:, None]
    counts = torch.arange(photons + 1, dtype=torch.float64)
    mass = torch.exp(torch.xlogy(counts, rates) - rates - torch.lgamma(counts + 1))
    mass[:, -1] = (1 - mass[:, :-1].sum(1)).clamp_min(0)
    mass *= photons + 1
    share = torch.ones_like(mass)
    other = torch.arange(photons + 1, dtype=torch.int32).repeat(LEVELS, 1)
    # The poorest column is filled up to 1 by the richest, until none lacks anything.
    while True:
        poor, rich = mass.argmin(1), mass.argmax(1)
        row = (mass.amin(1) < 1 - _BALANCED).nonzero()[:, 0]
        if not len(row):
            return share.float().flatten(), other.flatten()
        poor, rich = poor[row], rich[row]
        share[row, poor], other[row, poor] = mass[row, poor], rich.int()
        mass[row, rich] -= 1 - mass[row, poor]
        mass[row, poor] = 1
