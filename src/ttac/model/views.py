"""Weak and strong views of a batch, each sample with its own draw, all from one explicit generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ttac.model.colour import grey

StrongView = Literal["fixmatch", "own-range"]

LARGEST_MAGNITUDE = 30  # the last of RandAugment's 31 magnitude bins
MAGNITUDE_STEPS = 9  # FixMatch draws from 1 to 9 of 10
USUAL_MAGNITUDE: dict[StrongView, int] = {"fixmatch": 27, "own-range": 10}
GREY = 127 / 255  # of Cutout


def random_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror each image left to right with probability one half: `[N, C, H, W] -> [N, C, H, W]`.

    >>> random_flip(torch.ones(2, 3, 4, 4), torch.Generator()).shape
    torch.Size([2, 3, 4, 4])
    """
    chosen = (torch.rand(len(images), generator=generator) < 0.5).to(images.device)
    return torch.where(chosen[:, None, None, None], images.flip(-1), images)


def random_crop(images: Tensor, generator: torch.Generator, *, padding: int = 4) -> Tensor:
    """Shift each image by up to `padding` pixels, the border filled by reflection.

    >>> random_crop(torch.ones(2, 3, 8, 8), torch.Generator()).unique()
    tensor([1.])
    """
    count, channels, height, width = images.shape
    if padding >= min(height, width):
        raise ValueError(f"padding {padding} needs images larger than that on both sides, not {height} x {width}")
    shifts = torch.randint(0, 2 * padding + 1, (2, count), generator=generator).to(images.device) - padding
    rows, columns = (_reflected(shift, side) for shift, side in zip(shifts, (height, width), strict=True))
    # Whole rows first, as they are quick to copy. The result is contiguous whatever the strides of the images: torch
    # 2.13's convolutions of four channels write out of bounds in the backward pass of channels-last ones.
    planes = torch.arange(count * channels, device=images.device).view(count, channels, 1)
    taken = images.reshape(-1, width).index_select(0, (planes * height + rows[:, None]).flatten())
    return taken.view(images.shape).gather(3, columns[:, None, None].expand(images.shape))


def _reflected(shifts: Tensor, side: int) -> Tensor:
    """Give the pixel that each place along a side shows after a shift, reflected at both ends: `[N] -> [N, side]`."""
    places = shifts[:, None] + torch.arange(side, device=shifts.device)
    return side - 1 - (side - 1 - places.abs()).abs()


def weak_view(images: Tensor, generator: torch.Generator, *, flip: bool, crop: bool) -> Tensor:
    """Mirror if `flip`, shift by up to an eighth of the shorter side if `crop`: `[N, C, H, W] -> [N, C, H, W]`.

    >>> weak_view(torch.ones(2, 3, 8, 8), torch.Generator(), flip=True, crop=True).shape
    torch.Size([2, 3, 8, 8])
    """
    view = random_flip(images, generator) if flip else images
    return random_crop(view, generator, padding=min(images.shape[-2:]) // 8) if crop else view


def strong_view(
    images: Tensor,
    generator: torch.Generator,
    *,
    flip: bool,
    kind: StrongView = "fixmatch",
    operations: int = 2,
    magnitude: int | None = None,
    strength: float = 1.0,
) -> Tensor:
    """Mirror if `flip`, shift, and change by RandAugment's operations: `[N, C, H, W] -> [N, C, H, W]`, both in [0, 1].

    "fixmatch" is FixMatch's view: `random_operations` up to `magnitude`, then Cutout of half the shorter side.
    "own-range" applies every operation at `magnitude`, within the range of each image and cuts nothing out: RandAugment
    takes images for granted that use the whole range; of a faint one, black borders and stretched contrast make another
    domain. Without a `magnitude` it is that of `USUAL_MAGNITUDE`.

    A `strength` below 1 scales magnitudes, and for "fixmatch" the probability of operations and the side of the square
    too; at 0 the image is mirrored and shifted alone. The draws are the same at every strength.

    >>> strong_view(torch.ones(2, 3, 8, 8), torch.Generator(), flip=True).shape
    torch.Size([2, 3, 8, 8])
    """
    magnitude = USUAL_MAGNITUDE[kind] if magnitude is None else magnitude
    wide = images.float() if images.dtype in (torch.float16, torch.bfloat16) else images
    view = weak_view(wide, generator, flip=flip, crop=True)
    if kind == "own-range":
        view = _operate_within_range(view, generator, operations, magnitude, strength)
    else:
        view = random_operations(view, generator, operations=operations, magnitude=magnitude, strength=strength)
        view = cut_out(view, generator, round(strength * (min(images.shape[-2:]) // 2)))
    return view.to(images.dtype)


def random_operations(
    images: Tensor,
    generator: torch.Generator,
    *,
    operations: int = 2,
    magnitude: int = USUAL_MAGNITUDE["fixmatch"],
    strength: float = 1.0,
) -> Tensor:
    """Apply RandAugment's operations as FixMatch does: `[N, C, H, W] -> [N, C, H, W]`, both in [0, 1].

    Each of the `operations` has probability one half, and its magnitude is one of nine equal steps up to `magnitude`;
    `strength` scales both.

    >>> random_operations(torch.ones(2, 3, 8, 8), torch.Generator()).shape
    torch.Size([2, 3, 8, 8])
    """
    drawn, signs = _draw_operations(len(images), operations, magnitude, strength, generator)
    steps = torch.randint(1, MAGNITUDE_STEPS + 1, signs.shape, generator=generator)
    applied = torch.rand(signs.shape, generator=generator) < 0.5 * strength
    drawn = drawn.where(applied, OPERATIONS.index("Identity"))
    magnitudes = strength * magnitude / MAGNITUDE_STEPS * steps * signs
    for slot in range(operations):
        images = apply_operations(images, drawn[slot], magnitudes[slot])
    return images


def cut_out(images: Tensor, generator: torch.Generator, side: int) -> Tensor:
    """Paint a square of `side` pixels grey (Cutout), around a pixel that is drawn for each of `[N, C, H, W]`.

    What of the square would be outside the image is lost.

    >>> cut_out(torch.ones(1, 1, 8, 8), torch.Generator(), 8).mean() < 1
    tensor(True)
    """

    def covered(length: int) -> Tensor:
        first = torch.randint(length, (len(images), 1), generator=generator).to(images.device) - side // 2
        places = torch.arange(length, device=images.device)
        return (places >= first) & (places < first + side)

    rows, columns = covered(images.shape[2]), covered(images.shape[3])
    return images.masked_fill((rows[:, :, None] & columns[:, None])[:, None], GREY)


def _operate_within_range(
    images: Tensor, generator: torch.Generator, operations: int, magnitude: int, strength: float
) -> Tensor:
    """Apply operations at one magnitude to images that are stretched to [0, 1] and shrunk to their range again."""
    drawn, signs = _draw_operations(len(images), operations, magnitude, strength, generator)
    if strength == 0:  # some operations have no magnitude
        return images
    low = images.amin((1, 2, 3), keepdim=True)
    span = (images.amax((1, 2, 3), keepdim=True) - low).clamp_min(1 / 255)
    view = (images - low) / span
    for slot in range(operations):
        view = apply_operations(view, drawn[slot], strength * magnitude * signs[slot])
    return (low + span * view).clamp_(0, 1)


def _draw_operations(
    count: int, operations: int, magnitude: int, strength: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw operations and signs of their magnitudes `[operations, count]`, on the CPU.

    Operations without a direction have a sign drawn too: the draws of one image then never move those of another.
    """
    if not 0 <= magnitude <= LARGEST_MAGNITUDE:
        raise ValueError(f"magnitude {magnitude} is not one of the bins 0 to {LARGEST_MAGNITUDE}")
    if not 0 <= strength <= 1:
        raise ValueError(f"strength must be from 0 to 1, not {strength}")
    drawn = torch.randint(len(OPERATIONS), (operations, count), generator=generator)
    return drawn, 1 - 2 * torch.randint(2, (operations, count), generator=generator)


def apply_operations(images: Tensor, drawn: Tensor, magnitudes: Tensor) -> Tensor:
    """Apply operation `drawn[n]` (its place in `OPERATIONS`) at signed `magnitudes[n]` to each of `[N, C, H, W]`.

    >>> brightness = torch.tensor([OPERATIONS.index("Brightness")] * 2)
    >>> apply_operations(torch.full((2, 1, 1, 1), 0.5), brightness, torch.tensor([10, -10])).flatten()
    tensor([0.6500, 0.3500])
    """
    result = images.clamp(0, 1).contiguous()
    for names, transform in _TRANSFORMS.items():
        first = OPERATIONS.index(names[0])
        # `drawn` is on the CPU, so that finding the rows of an operation never waits for a GPU.
        rows = ((drawn >= first) & (drawn < first + len(names))).nonzero()[:, 0]
        if len(rows):
            kinds = (drawn[rows] - first).to(images.device)
            selected = rows.to(images.device)
            batch = result.index_select(0, selected)
            result.index_copy_(0, selected, transform(batch, kinds, magnitudes[rows].to(images)).clamp_(0, 1))
    return result


def _move(images: Tensor, kinds: Tensor, magnitudes: Tensor) -> Tensor:
    """Shear, translate or rotate, by the place of the operation in `_GEOMETRIC`."""
    height, width = images.shape[-2:]

    def only(name: str, values: Tensor) -> Tensor:
        return torch.where(kinds == _GEOMETRIC.index(name), values, 0)

    # The ranges end at magnitude 30: shear 0.3, translation 150/331 of the side in whole pixels, rotation 30 degrees.
    # The division comes last because the product is exact, and a quotient that is a whole number must stay one.
    shear_x = only("ShearX", 0.01 * magnitudes)
    shear_y = only("ShearY", 0.01 * magnitudes)
    shift_x = only("TranslateX", (5 * width * magnitudes / 331).trunc())
    shift_y = only("TranslateY", (5 * height * magnitudes / 331).trunc())
    angle = only("Rotate", torch.deg2rad(magnitudes))
    # Output to input coordinates in units of half a side, the origin at the centre; shears keep the top left corner.
    aspect = height / width
    to_x = [angle.cos(), (shear_x - angle.sin()) * aspect, shear_x * aspect - 2 * shift_x / width]
    to_y = [(shear_y + angle.sin()) / aspect, angle.cos(), shear_y / aspect - 2 * shift_y / height]
    x, y = _centres(width, images), _centres(height, images)[:, None]
    # One term along each side instead of `affine_grid`, whose product of matrices takes longer than the sampling. A
    # plane for each coordinate is also what the sampling reads fastest.
    matrices = torch.stack([torch.stack(to_x, 1), torch.stack(to_y, 1)], 1)[..., None, None]  # [N, 2, 3, 1, 1]
    grid = matrices[:, :, 0] * x + (matrices[:, :, 1] * y + matrices[:, :, 2])  # [N, 2, H, W]
    # Outside is black as in torchvision, whose default is nearest neighbour: on small images bilinear is smoother.
    return F.grid_sample(images, grid.permute(0, 2, 3, 1), mode="bilinear", padding_mode="zeros", align_corners=False)


def _centres(side: int, images: Tensor) -> Tensor:
    """Give the centres of the pixels along a side that reaches from -1 to 1, in the type of `images`."""
    return (2 * torch.arange(side, device=images.device) + 1).to(images) / side - 1


def _blend(images: Tensor, degenerate: Tensor, magnitudes: Tensor) -> Tensor:
    """Move away from (positive) or towards (negative) the `degenerate` images, by 0.9 of the way at magnitude 30."""
    return degenerate.lerp(images, 1 + 0.03 * magnitudes[:, None, None, None])


def _sharpen(images: Tensor, magnitudes: Tensor) -> Tensor:
    """Blend in place with the average over 3 x 3, of weight 5 in the middle; the border is kept, as in Pillow."""
    rows = images[:, :, :-2] + images[:, :, 1:-1] + images[:, :, 2:]
    boxes = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    inside = images[:, :, 1:-1, 1:-1]
    inside.copy_(_blend(inside, (boxes + 4 * inside) / 13, magnitudes))
    return images


def _levels(images: Tensor) -> Tensor:
    """Round [0, 1] to the nearest of the levels 0 ... 255, which stay floats: integers are slow to convert to.

    Levels have no gradient, so what follows may change them in place.
    """
    return (255 * images.detach()).round_()


def _posterize(levels: Tensor, magnitudes: Tensor) -> Tensor:
    """Clear the lowest bits, 4 of the 8 at magnitude 30."""
    step = (magnitudes.abs() / 7.5).round().exp2()[:, None, None, None]
    return levels.div_(step).floor_().mul_(step)


def _solarize(levels: Tensor, magnitudes: Tensor) -> Tensor:
    """Invert the levels from a threshold on, all of them at magnitude 30."""
    threshold = 255 - 8.5 * magnitudes.abs()[:, None, None, None]
    return torch.where(levels < threshold, levels, 255 - levels)


def _autocontrast(levels: Tensor) -> Tensor:
    """Stretch every channel of every image to 0 ... 255."""
    low, high = levels.amin((2, 3), keepdim=True), levels.amax((2, 3), keepdim=True)
    flat = low == high  # is kept: from 0 and 255 levels wide
    low, span = low.masked_fill(flat, 0), (high - low).masked_fill(flat, 255)
    # The floor is exact: a quotient that is no whole number is at least 1 / 255 away from one, far more than rounding.
    # Pillow scales by a rounded factor, sometimes falls just below a whole number and gives one level less.
    return levels.sub_(low).mul_(255).div_(span).floor_()


def _equalize(levels: Tensor) -> Tensor:
    """Equalise the histogram of every channel of every image by Pillow's integer rule."""
    pixels = levels.flatten(2).long()  # [N, C, H * W]
    histogram = pixels.new_zeros(*pixels.shape[:2], 256).scatter_add_(2, pixels, torch.ones_like(pixels))
    brightest = histogram.gather(2, pixels.amax(2, keepdim=True))
    step = (pixels.shape[2] - brightest) // 255
    below = histogram.cumsum(2) - histogram
    table = (below + step // 2) // step.clamp(min=1)  # may pass 255, which `apply_operations` clips as Pillow does
    table = torch.where(step > 0, table, torch.arange(256, device=levels.device)).to(levels)
    return table.gather(2, pixels).view(levels.shape)


_GEOMETRIC = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
# Operations that share a call, and that call on: their images, the place of each one's operation, signed magnitudes.
_TRANSFORMS: dict[tuple[str, ...], Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    _GEOMETRIC: _move,
    ("Brightness",): lambda images, _, by: _blend(images, torch.zeros_like(images), by),
    ("Color",): lambda images, _, by: _blend(images, grey(images), by),
    ("Contrast",): lambda images, _, by: _blend(images, grey(images).mean((1, 2, 3), keepdim=True), by),
    ("Sharpness",): lambda images, _, by: _sharpen(images, by),
    ("Posterize",): lambda images, _, by: _posterize(_levels(images), by).div_(255),
    ("Solarize",): lambda images, _, by: _solarize(_levels(images), by).div_(255),
    ("AutoContrast",): lambda images, _, by: _autocontrast(_levels(images)).div_(255),
    ("Equalize",): lambda images, _, by: _equalize(_levels(images)).div_(255),
}
OPERATIONS = ("Identity", *(name for names in _TRANSFORMS for name in names))  # in torchvision's order
