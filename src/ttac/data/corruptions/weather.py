"""Snow, frost and fog."""

from __future__ import annotations

import torch
from torch import Tensor

from ttac.data.corruptions.colour import in_colour
from ttac.data.corruptions.draws import Draws
from ttac.data.corruptions.filters import clipped_zoom, motion_blur_along
from ttac.data.corruptions.frost import FrostPhotographs, frost_crops
from ttac.data.corruptions.plasma import plasma
from ttac.model.colour import grey


@in_colour
def snow(images: Tensor, constants: tuple[float, ...], draws: Draws) -> Tensor:
    """Whiten each image, and lay flakes over it that fall two ways, the second the first turned by 180 degrees."""
    mean, deviation, zoom, threshold, radius, sigma, kept = constants
    flakes = mean + deviation * draws.normal(1, *images.shape[2:])
    flakes = clipped_zoom(flakes, zoom)
    flakes = torch.where(flakes < threshold, 0, flakes.clamp(0, 1))
    angles = -135 + 90 * draws.uniform()
    flakes = motion_blur_along((255 * flakes).floor_(), radius, sigma, angles).round() / 255
    white = torch.maximum(images, 1.5 * grey(images) + 0.5)
    return torch.lerp(white, images, kept) + flakes + flakes.flip(2, 3)


@in_colour
def frost(
    images: Tensor, constants: tuple[float, ...], draws: Draws, photographs: FrostPhotographs | None = None
) -> Tensor:
    """Mix each image with a random crop of a photograph of frost, or of a texture like it."""
    kept, added = constants
    return kept * images + added * frost_crops(images, draws, photographs)


def fog(images: Tensor, constants: tuple[float, ...], draws: Draws) -> Tensor:
    """Add a fractal cloud to each image, and scale the sum to the image's brightest value."""
    strength, decay = constants
    height, width = images.shape[2:]
    side = 1 << (max(height, width) - 1).bit_length()
    cloud = plasma(draws.uniform(side, side), decay)[:, None, :height, :width]
    brightest = images.amax((1, 2, 3), keepdim=True)
    return (images + strength * cloud) * (brightest / (brightest + strength))
