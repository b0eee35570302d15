"""Brightness, contrast, saturation, elastic deformation, pixels and JPEG."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from ttac.data.corruptions.colour import in_colour
from ttac.data.corruptions.draws import Draws
from ttac.data.corruptions.filters import gaussian_filter


@in_colour
def brightness(images: Tensor, constants: tuple[float, ...], draws: Draws) -> Tensor:
    """Raise the value of HSV.

    Hue and saturation stay where all channels grow by one factor; black has neither and turns grey.
    """
    value = images.amax(1, keepdim=True)
    raised = (value + constants[0]).clamp_(max=1)
    return torch.where(value > 0, images * (raised / value), raised)


@in_colour
def saturate(images: Tensor, constants: tuple[float, ...], draws: Draws) -> Tensor:
    """Multiply the saturation of HSV and add to it.

    With value v and saturation s, a channel is v (1 - s k), where the hue alone tells k: 0 for the strongest channel,
    1 for the weakest. Grey has the hue of red, as in the published images.
    """
    factor, summand = constants
    value, low = images.amax(1, keepdim=True), images.amin(1, keepdim=True)
    span = value - low
    saturation = (factor * span / value.clamp(min=1e-6) + summand).clamp_(0, 1)
    red = images.new_tensor([0.0, 1.0, 1.0])[:, None, None]
    hue = torch.where(span > 0, (value - images) / span, red)
    return value * (1 - saturation * hue)


def contrast(images: Tensor, constants: tuple[float, ...], draws: Draws) -> Tensor:
    """Draw every channel to its mean."""
    mean = images.mean((2, 3), keepdim=True)
    return torch.lerp(mean, images, constants[0])


def pixelate(images: Tensor, constants: tuple[float, ...], draws: Draws) -> Tensor:
    """Shrink each image by Pillow's box filter, which rounds to levels after each axis, and enlarge it again."""
    (rows, rows_back), (columns, columns_back) = (
        (part.to(images) for part in _boxes(side, int(side * constants[0]))) for side in images.shape[2:]
    )
    levels = (255 * images).round_() @ columns
    levels = levels.div_(columns.sum(0)).add_(0.5).floor_()
    levels = rows.T @ levels
    levels = levels.div_(rows.sum(0)[:, None]).add_(0.5).floor_()
    return (rows_back @ levels @ columns_back.T).div_(255)


def _boxes(side: int, smaller: int) -> tuple[Tensor, Tensor]:
    """Say which pixels of a side are in which box, and which box is the colour of which pixel, `[side, smaller]` both.

    Pillow takes a pixel to be in the box that its centre is in, so that boxes have a whole number of pixels. It asks
    twice, in double precision, which decides for a centre between two boxes.

    >>> _boxes(3, 2)[0].long().tolist(), _boxes(3, 2)[1].tolist()
    ([[1, 0], [1, 0], [0, 1]], [[1, 0], [0, 1], [0, 1]])
    """
    scale, pixels = side / smaller, torch.arange(side)[:, None]
    centres = (torch.arange(smaller, dtype=torch.float64) + 0.5) * scale
    between = (pixels >= (centres - 0.5 * scale + 0.5).floor()) & (pixels < (centres + 0.5 * scale + 0.5).floor())
    distances = (pixels - centres + 0.5) * (1 / scale)
    back = ((pixels[:, 0].double() + 0.5) * (smaller / side)).long()
    return between & (distances > -0.5) & (distances <= 0.5), F.one_hot(back, smaller)


def jpeg_compression(images: Tensor, constants: tuple[float, ...], draws: Draws) -> Tensor:
    """Code and decode by Pillow, with its defaults but for the quality `constants[0]`."""
    pixels = (255 * images).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    coded = np.empty_like(pixels)
    for image, result in zip(pixels, coded, strict=True):
        result[:] = _through_jpeg(image, int(constants[0]))
    return torch.from_numpy(coded).to(images.device).permute(0, 3, 1, 2).float().div_(255)


def _through_jpeg(pixels: NDArray[np.uint8], quality: int) -> NDArray[np.uint8]:
    """Code and decode one image `[H, W, C]`."""
    grey = pixels.shape[2] == 1
    file = BytesIO()
    Image.fromarray(pixels[:, :, 0] if grey else pixels).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file, formats=("JPEG",))).reshape(pixels.shape)


def elastic_transform(images: Tensor, constants: tuple[float, ...], draws: Draws) -> Tensor:
    """Move three points for an affine map, then every pixel by a smooth random field; two interpolations."""
    strength, smoothness, largest_move = constants
    height, width = images.shape[2:]
    moves = largest_move * (2 * draws.uniform(3, 2) - 1)
    # Border: d c b | a b c d | c b a, then d c b a | a b c d | d c b a.
    images = _read_at(images, _affine(moves, height, width), corners=True)
    field = strength * gaussian_filter(2 * draws.uniform(2, height, width) - 1, smoothness, truncate=3, mode="reflect")
    return _read_at(images, _pixels(height, width, field.device) + field.permute(0, 2, 3, 1), corners=False)


def _affine(moves: Tensor, height: int, width: int) -> Tensor:
    """Find where the pixels of the result come from, `[N, H, W, 2]` as (x, y), if three points are moved `[N, 3, 2]`.

    The points are b + (0, 2a), b and b - (2a, 0), so that the differences of where they go are the columns of the map.
    """
    half = min(height, width) // 3
    base = moves.new_tensor([width // 2 + half, height // 2 - half])
    (x0, y0), (x1, y1), (x2, y2) = (point.unbind(1) for point in moves.unbind(1))
    a, b = 1 + (x1 - x2) / (2 * half), (x0 - x1) / (2 * half)
    c, d = (y1 - y2) / (2 * half), 1 + (y0 - y1) / (2 * half)
    determinant = a * d - b * c
    # Three points in a line leave nothing to invert: every pixel is then that of the second point.
    determinant = torch.where(determinant == 0, torch.inf, determinant)
    along_x, along_y = (torch.stack(step, 1) / determinant[:, None] for step in ((d, -c), (-b, a)))  # [N, 2]
    goal = base + moves[:, 1]
    origin = base - along_x * goal[:, :1] - along_y * goal[:, 1:]
    columns = along_x[:, None] * torch.arange(width, device=moves.device)[:, None]
    rows = origin[:, None] + along_y[:, None] * torch.arange(height, device=moves.device)[:, None]
    return rows[:, :, None] + columns[:, None]


def _pixels(height: int, width: int, device: torch.device) -> Tensor:
    """List the coordinates (x, y) of all pixels, `[H, W, 2]`."""
    rows, columns = torch.arange(height, device=device), torch.arange(width, device=device)
    return torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1).float()


def _read_at(images: Tensor, places: Tensor, *, corners: bool) -> Tensor:
    """Interpolate at `places [N, H, W, 2]` in pixels; a mirror stands on the pixels at the border, or outside them."""
    size = places.new_tensor([images.shape[3], images.shape[2]])
    places = (places * (2 / (size - 1))).sub_(1) if corners else (places * (2 / size)).add_(1 / size - 1)
    return F.grid_sample(images, places, mode="bilinear", padding_mode="reflection", align_corners=corners)
