"""The shifts of the tables in results/protocols: `[N, C, H, W]` in [0, 1] to the same."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Shift = Callable[[Tensor, torch.Generator], Tensor]


def gaussian_noise(images: Tensor, generator: torch.Generator, *, sigma: float) -> Tensor:
    """Add normal noise to every pixel."""
    return (images + sigma * torch.randn(images.shape, generator=generator)).clamp(0, 1)


def speckle_noise(images: Tensor, generator: torch.Generator, *, sigma: float) -> Tensor:
    """Multiply every pixel with normal noise around 1."""
    return (images + images * sigma * torch.randn(images.shape, generator=generator)).clamp(0, 1)


def impulse_noise(images: Tensor, generator: torch.Generator, *, share: float) -> Tensor:
    """Replace a share of all values by black or white."""
    draw = torch.rand(images.shape, generator=generator)
    return torch.where(draw < share / 2, 0.0, torch.where(draw < share, 1.0, images))


def blur(images: Tensor, generator: torch.Generator, *, sigma: float) -> Tensor:
    """Convolve with a Gaussian of `sigma` pixels."""
    radius = math.ceil(3 * sigma)
    line = torch.exp(-0.5 * (torch.arange(-radius, radius + 1) / sigma) ** 2)
    line = (line / line.sum()).repeat(images.shape[1], 1, 1, 1)
    padded = F.pad(images, [radius] * 4, mode="reflect")
    across = F.conv2d(padded, line, groups=images.shape[1])
    return F.conv2d(across, line.mT, groups=images.shape[1])


def low_contrast(images: Tensor, generator: torch.Generator, *, factor: float) -> Tensor:
    """Draw all pixels to the image's mean."""
    mean = images.mean((1, 2, 3), keepdim=True)
    return mean + factor * (images - mean)


def fog(images: Tensor, generator: torch.Generator, *, strength: float) -> Tensor:
    """Lay a bright and smooth random cloud over each image, and keep the range."""
    cloud = torch.zeros(len(images), 1, *images.shape[2:])
    for octave in range(1, 5):
        coarse = torch.rand(len(images), 1, 2**octave, 2**octave, generator=generator)
        cloud += F.interpolate(coarse, size=images.shape[2:], mode="bilinear", align_corners=True) / 1.7**octave
    cloud = strength * cloud / cloud.amax((2, 3), keepdim=True)
    top = images.amax((1, 2, 3), keepdim=True)
    return (images + cloud) * top / (top + strength)


def pixelate(images: Tensor, generator: torch.Generator, *, factor: float) -> Tensor:
    """Shrink each image by `factor` and enlarge it again without smoothing."""
    small = F.interpolate(images, scale_factor=factor, mode="area")
    return F.interpolate(small, size=images.shape[2:], mode="nearest")
