"""Drops of water and mud."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ttac.data.corruptions.colour import in_colour
from ttac.data.corruptions.draws import Draws
from ttac.data.corruptions.filters import gaussian_filter

PALE_TURQUOISE, BROWN = (175, 238, 238), (63, 42, 20)
FARTHEST = 20  # pixels from an edge, beyond which water is the same
LOW, HIGH = 50, 150  # gradients of Canny's edges


@in_colour
def spatter(images: Tensor, constants: tuple[float, ...], draws: Draws) -> Tensor:
    """Spatter each image with water, which shines at the edges of its drops, or with mud, which covers."""
    mean, deviation, smoothness, threshold, strength, mud = constants
    liquid = gaussian_filter(mean + deviation * draws.normal(1, *images.shape[2:]), smoothness)
    if mud:
        cover = gaussian_filter((liquid > threshold).to(images), strength)
        cover = torch.where(cover < 0.8, 0, cover)
        return torch.lerp(images, _colour(BROWN, images), cover)
    # Past 255 the bytes of the published images begin again at 0.
    levels = (255 * torch.where(liquid < threshold, 0, liquid)).floor_().remainder_(256)[:, 0]
    shine = levels * relief(distances(edges(levels)))
    # An image without a drop has no shine to divide by.
    shine = strength * shine / shine.amax((1, 2), keepdim=True).clamp(min=1)
    return images + shine[:, None] * _colour(PALE_TURQUOISE, images)


def _colour(rgb: tuple[int, int, int], images: Tensor) -> Tensor:
    return images.new_tensor(rgb)[:, None, None] / 255


def edges(levels: Tensor) -> Tensor:
    """Find Canny's edges as OpenCV does, in levels 0 ... 255 `[N, H, W]`: one pixel wide, where |dx| + |dy| is high.

    An edge pixel has the largest gradient across the edge; it is above HIGH, or above LOW and linked to one that is.

    >>> edges(255 * (torch.arange(8) > 3).float().expand(1, 8, 8))[0, 0].long()
    tensor([0, 0, 0, 1, 0, 0, 0, 0])
    """
    around = F.pad(levels[:, None], [1] * 4, mode="replicate")[:, 0]
    down = around[:, :-2] + 2 * around[:, 1:-1] + around[:, 2:]
    across = around[:, :, :-2] + 2 * around[:, :, 1:-1] + around[:, :, 2:]
    dx, dy = down[:, :, 2:] - down[:, :, :-2], across[:, 2:] - across[:, :-2]
    width, height = dx.abs(), dy.abs()
    gradient = width + height
    grown = F.pad(gradient, [1] * 4)
    above, row, below = grown[:, :-2], grown[:, 1:-1], grown[:, 2:]
    left, centre, right = slice(0, -2), slice(1, -1), slice(2, None)
    # tan 22.5° in 15 bits, and tan 67.5° = 2 + tan 22.5°
    diagonal = 13573 / 2**15 * width
    flat, steep = height < diagonal, height - 2 * width > diagonal
    beside = (gradient > row[..., left]) & (gradient >= row[..., right])
    over = (gradient > above[..., centre]) & (gradient >= below[..., centre])
    falling = (gradient > above[..., left]) & (gradient > below[..., right])
    rising = (gradient > above[..., right]) & (gradient > below[..., left])
    largest = torch.where(flat, beside, torch.where(steep, over, torch.where(dx * dy < 0, rising, falling)))
    return linked(largest & (gradient > HIGH), largest & (gradient > LOW))


def linked(seeds: Tensor, allowed: Tensor) -> Tensor:
    """Grow `seeds [N, H, W]` to all that is `allowed` and touches them, by a side or a corner, directly or not."""
    while True:
        tall = F.pad(seeds, (0, 0, 1, 1))
        tall = tall[:, :-2] | seeds | tall[:, 2:]
        wide = F.pad(tall, (1, 1))
        grown = (wide[..., :-2] | tall | wide[..., 2:]) & allowed
        if grown.equal(seeds):
            return seeds
        seeds = grown


def distances(marked: Tensor) -> Tensor:
    """Measure how far each pixel of `[N, H, W]` is from the next marked one, FARTHEST at most.

    The distance is exact, where the published images have OpenCV's, which is within 2 percent of it.
    """
    squares = FARTHEST**2 * (~marked).short()
    return _next_parabola(_next_parabola(squares.mT).mT).float().sqrt_()


def _next_parabola(squares: Tensor) -> Tensor:
    """Lower each of `squares [N, H, W]` to that of a pixel d rows away plus d², for all d."""
    squares = squares.contiguous()
    size, lowest = squares.shape[1], squares.clone()
    for d in range(1, min(FARTHEST, size)):
        raised = squares + d**2
        for to, source in ((0, d), (d, 0)):
            part = lowest[:, to : to + size - d]
            torch.minimum(part, raised[:, source : source + size - d], out=part)
    return lowest


def relief(heights: Tensor) -> Tensor:
    """Light `[N, H, W]`, in 0 ... 20, from a corner: equalised, embossed and smoothed, in levels 0 ... 255."""
    levels = equalised(_box(heights).floor_())
    padded = _mirrored(levels)
    up, here, down = padded[:, :-2], padded[:, 1:-1], padded[:, 2:]
    left, centre, right = slice(0, -2), slice(1, -1), slice(2, None)
    embossed = 2 * (down[..., right] - up[..., left]) + here[..., right] - here[..., left]
    embossed += down[..., centre] - up[..., centre] + here[..., centre]
    return _box(embossed.clamp_(0, 255)).round_()


def equalised(levels: Tensor) -> Tensor:
    """Equalise the histogram of each of `[N, H, W]`, whole numbers up to FARTHEST, to 0 ... 255 by OpenCV's rule.

    >>> equalised(torch.tensor([[[3.0, 5.0], [5.0, 9.0]]]))
    tensor([[[  0., 170.],
             [170., 255.]]])
    """
    count, bins = len(levels), FARTHEST + 1
    places = levels.flatten(1).long() + bins * torch.arange(count, device=levels.device)[:, None]
    histogram = torch.bincount(places.flatten(), minlength=count * bins).view(count, bins)
    upto = histogram.cumsum(1)
    lowest = histogram.gather(1, (upto > 0).long().argmax(1, keepdim=True))
    others = upto[:, -1:] - lowest
    table = ((upto - lowest) * (255 / others.clamp(min=1).float())).round_()
    result = table.flatten()[places].view_as(levels)
    return torch.where((others > 0)[..., None], result, levels)


def _box(planes: Tensor) -> Tensor:
    """Average `[N, H, W]` over 3 x 3."""
    padded = _mirrored(planes)
    tall = padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]
    return (tall[..., :-2] + tall[..., 1:-1] + tall[..., 2:]) / 9


def _mirrored(planes: Tensor) -> Tensor:
    """Add a border of one pixel, the mirror along the edge pixels."""
    return F.pad(planes[:, None], [1] * 4, mode="reflect")[:, 0]
