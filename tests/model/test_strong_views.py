"""FixMatch's strong views against plain loops over the same draws, and their shares against what is expected."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from ttac.model.views import (
    OPERATIONS,
    StrongView,
    apply_operations,
    cut_out,
    random_operations,
    strong_view,
    weak_view,
)

GREY = 127 / 255


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def photographs(count: int, channels: int, height: int, width: int) -> Tensor:
    return torch.rand(count, channels, height, width, generator=seeded(0))


def painted(image: Tensor, row: int, column: int, side: int) -> Tensor:
    """One image `[C, H, W]` with a square around a pixel, which is the first of its second half."""
    image = image.clone()
    for y in range(row - side // 2, row - side // 2 + side):
        for x in range(column - side // 2, column - side // 2 + side):
            if 0 <= y < image.shape[1] and 0 <= x < image.shape[2]:
                image[:, y, x] = GREY
    return image


@pytest.mark.parametrize("strength", [1.0, 0.7])
@pytest.mark.parametrize(
    ("shape", "side"), [((3, 32, 32), 16), ((1, 24, 44), 12), ((4, 27, 18), 9)], ids=["square", "wide", "tall"]
)
def test_view_equals_a_loop_over_images(shape: tuple[int, int, int], side: int, strength: float) -> None:
    count, images = 60, photographs(60, *shape)
    view = strong_view(images, seeded(), flip=True, strength=strength)
    generator = seeded()
    weak = weak_view(images, generator, flip=True, crop=True)
    drawn = torch.randint(14, (2, count), generator=generator)
    signs = torch.randint(2, (2, count), generator=generator).tolist()
    tenths = torch.randint(1, 10, (2, count), generator=generator).tolist()
    chances = torch.rand(2, count, generator=generator).tolist()
    rows, columns = (torch.randint(length, (count,), generator=generator).tolist() for length in shape[1:])
    for n in range(count):
        expected = weak[[n]]
        for slot in range(2):
            if chances[slot][n] < strength / 2:
                magnitude = strength * 3 * tenths[slot][n] * (-1 if signs[slot][n] else 1)
                expected = apply_operations(expected, drawn[slot, [n]], torch.tensor([magnitude]))
        expected = painted(expected[0], rows[n], columns[n], round(strength * side))
        # Elsewhere in a batch a sum may be rounded otherwise, which moves a pixel by a level.
        torch.testing.assert_close(view[n], expected, atol=1.01 / 255, rtol=0)
        assert (view[n] - expected).abs().mean() < 1e-4


@pytest.mark.parametrize("kind", get_args(StrongView))
def test_strength_nought_is_a_weak_view_and_no_strength_moves_a_draw(kind: StrongView) -> None:
    images = photographs(40, 3, 16, 20)
    generators = [seeded() for _ in range(3)]
    views = [
        strong_view(images, generator, flip=True, kind=kind, strength=strength)
        for generator, strength in zip(generators, (0.0, 0.5, 1.0), strict=True)
    ]
    weak = weak_view(images, seeded(), flip=True, crop=True)
    assert torch.equal(views[0], weak)
    changes = [float((view - weak).abs().mean()) for view in views]
    assert 0 == changes[0] < changes[1] < changes[2]
    assert len({bytes(generator.get_state().tolist()) for generator in generators}) == 1


@pytest.mark.parametrize(("magnitude", "strength", "step"), [(27, 1.0, 0.09), (18, 1.0, 0.06), (27, 0.5, 0.045)])
def test_operations_have_probability_one_half_and_magnitudes_of_nine_steps(
    magnitude: int, strength: float, step: float
) -> None:
    # In the middle of a grey image of one channel only brightness changes more than one level.
    images = torch.full((40000, 1, 12, 12), 128 / 255)
    view = random_operations(images, seeded(), operations=1, magnitude=magnitude, strength=strength)
    ratios = view[:, 0, 6, 6] / images[:, 0, 6, 6]
    expected = strength / 2 / len(OPERATIONS) / 18
    for factor in (1 + step * sign * tenth for tenth in range(1, 10) for sign in (1, -1)):
        share = ((ratios - factor).abs() < 0.01).float().mean().item()
        assert share == pytest.approx(expected, abs=4 * (expected / len(images)) ** 0.5)  # four standard errors


def test_the_square_is_around_every_pixel_as_often() -> None:
    images = torch.ones(20000, 2, 5, 7)
    shown = (cut_out(images, seeded(), 4) == 1).float()
    assert torch.equal(shown[:, 0], shown[:, 1])
    expected = torch.zeros(5, 7)
    for row in range(5):
        for column in range(7):
            expected += (painted(images[0], row, column, 4)[0] == 1) / 35
    torch.testing.assert_close(shown[:, 0].mean(0), expected, atol=4 * 0.5 / 20000**0.5, rtol=0)


def test_a_view_takes_the_whole_range() -> None:
    faint = 0.4 + 0.1 * photographs(200, 3, 16, 16)
    view = strong_view(faint, seeded(), flip=True)
    assert view.min() == 0
    assert view.max() == 1
    # Of two operations on each of 200 images, 14 are expected to stretch the contrast.
    assert 4 < (view.amax((1, 2, 3)) == 1).sum() < 60
