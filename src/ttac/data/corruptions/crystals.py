"""Pictures of frost on a window, grown from random numbers: stems with branches, and branches with twigs."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ttac.data.corruptions.draws import Draws
from ttac.data.corruptions.plasma import plasma

PICTURES, SIDE = 5, 1024
SITES, STEMS = 70, 4  # places where crystals start, and how many stems each has
SPREAD = math.radians(42)  # between a stem and its branches
# Mean and deviation of red, green and blue: bright, cold, of the contrast of photographs.
MEANS, DEVIATIONS = (0.46, 0.50, 0.55), (0.23, 0.22, 0.21)


class _Lines(NamedTuple):
    """Arcs that start at `start [K, 2]` and go on for `length [K]` pixels, turning by `bend [K]` a pixel."""

    start: Tensor
    heading: Tensor
    length: Tensor
    bend: Tensor


@lru_cache(maxsize=1)
def frost_textures() -> tuple[Tensor, ...]:
    """Make the pictures, uint8 `[3, SIDE, SIDE]`, always the same ones: under a second, and once in a process."""
    return tuple(_picture(Draws(0, "frost", torch.tensor([number]), torch.device("cpu"))) for number in range(PICTURES))


def _picture(draws: Draws) -> Tensor:
    """Lay crystals with a faint halo over rime, whose veins are level lines of a cloud; in it the ice is thick."""
    crystals = _crystals(draws)
    fractal = plasma(draws.uniform(SIDE, SIDE), 1.25)[0]
    cloud = _smoothed(fractal, 16)
    rime = fractal.mul_(8).remainder_(2).sub_(1).abs_().sub_(1).square_()
    ice = crystals + 0.3 * (_smoothed(crystals, 8) + _smoothed(crystals, 32)) + 0.25 * rime
    clear = torch.exp(ice.mul_(cloud + 0.45).mul_(-1.5))  # what no ice covers
    shade = 1 - (1 - 0.3 * cloud) * clear
    shade = shade.sub_(shade.mean()).div_(shade.std())
    means, deviations = (255 * torch.tensor(values)[:, None, None] for values in (MEANS, DEVIATIONS))
    return (deviations * shade).add_(means).clamp_(0, 255).round_().byte()


def _crystals(draws: Draws) -> Tensor:
    """Draw crystals `[SIDE, SIDE]`, on a torus; twigs are faint, stems bright."""
    stems = _stems(draws)
    branches = _sprouts(stems, 13, 0.28, draws)
    twigs = _sprouts(branches, 7, 0.30, draws)
    canvas = torch.zeros(SIDE, SIDE)
    for lines, brightness, brush in (
        (twigs, 0.45, [(0, 0)]),
        (branches, 0.8, [(0, 0)]),
        (stems, 1.2, [(0, 0), (0, 1), (1, 0)]),
    ):
        rows, columns = _walked(lines, 1)[1].round().long().unbind(1)
        for down, across in brush:
            canvas[(rows + down) % SIDE, (columns + across) % SIDE] = brightness
    for axis in range(2):
        canvas = (2 * canvas + canvas.roll(1, axis) + canvas.roll(-1, axis)) / 4
    return canvas


def _stems(draws: Draws) -> _Lines:
    """Let a few stems of very different length fan out from each site."""
    sites = draws.uniform(SITES, 1, 3)[0]
    place_y, place_x, heading, length, bend = draws.uniform(SITES, STEMS, 5)[0].unbind(2)
    start = SIDE * sites[..., :2] + 20 * torch.stack([place_y, place_x], 2)
    heading = 2 * math.pi * sites[..., 2] + 1.3 * math.pi * heading
    length = 30 + 270 * length * length * length
    return _Lines(start.flatten(0, 1), heading.flatten(), length.flatten(), (2.4 * (bend - 0.5) / length).flatten())


def _sprouts(lines: _Lines, gap: int, share: float, draws: Draws) -> _Lines:
    """Let branches leave each line on both sides every `gap` pixels, as long as about `share` of what is ahead."""
    line, places, done = _walked(lines, gap)
    turn, size = draws.uniform(2, len(line), 2)[0]
    side = torch.tensor([1.0, -1.0])
    heading = lines.heading[line] + lines.bend[line] * done
    heading = heading[:, None] + side * (SPREAD + 0.3 * (turn - 0.5))
    length = share * (lines.length[line] - done)[:, None] * (0.5 + size)
    kept = length > 2
    bend = -0.35 * side / length.clamp(min=4)
    return _Lines(places[:, None].expand(-1, 2, -1)[kept], heading[kept], length[kept], bend[kept])


def _walked(lines: _Lines, gap: int) -> tuple[Tensor, Tensor, Tensor]:
    """List points every `gap` pixels: the number of their line `[P]`, their places `[P, 2]`, pixels from the start."""
    counts = (lines.length / gap).long()
    line = torch.repeat_interleave(torch.arange(len(counts)), counts)
    done = gap * (1 + torch.arange(len(line)) - (counts.cumsum(0) - counts)[line])
    ahead = torch.stack([lines.heading.sin(), lines.heading.cos()], 1)[line]
    aside = ahead.flip(1) * torch.tensor([1.0, -1.0])
    # An arc to second order.
    return line, lines.start[line] + done[:, None] * ahead + (lines.bend[line] * done**2 / 2)[:, None] * aside, done


def _smoothed(canvas: Tensor, size: int) -> Tensor:
    """Blur a torus `[SIDE, SIDE]` over some `size` pixels."""
    coarse = F.pad(F.avg_pool2d(canvas[None, None], size), [2] * 4, mode="circular")
    coarse = F.avg_pool2d(coarse, 3, 1)
    smooth = F.interpolate(coarse, scale_factor=size, mode="bilinear", align_corners=False)
    return smooth[0, 0, size:-size, size:-size]
