"""Images that are refused, each with a message that says what is wrong and what to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ttac.model.inputs import check_images


def grey(*shape: int) -> Tensor:
    return torch.full(shape, 0.5)


def with_pixel(value: float, count: int = 1) -> Tensor:
    """Eight grey images, the last `count` of which hold one pixel of that value."""
    images = grey(8, 3, 4, 4)
    images[-count:, 1, 2, 3] = value
    return images


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_good_images_pass_untouched(dtype: torch.dtype) -> None:
    images = torch.rand(4, 3, 5, 7).to(dtype)
    before = images.clone()
    assert check_images(images, 3) is images
    assert torch.equal(images, before)


def test_unknown_channels_are_not_checked() -> None:
    images = grey(2, 5, 4, 4)
    assert check_images(images, None) is images


@pytest.mark.parametrize("images", [grey(1, 1, 1, 1), grey(2, 1, 4, 4).requires_grad_(), grey(2, 4, 4, 1).mT.mT])
def test_unusual_but_good(images: Tensor) -> None:
    assert check_images(images, images.shape[1]) is images


@pytest.mark.parametrize("value", [-0.2, 1.2])
def test_a_little_overshoot_passes(value: float) -> None:
    assert check_images(with_pixel(value), 3).isfinite().all()


@pytest.mark.parametrize("images", [np.zeros((1, 3, 4, 4)), [grey(3, 4, 4)], None])
def test_not_a_tensor(images: Any) -> None:
    with pytest.raises(TypeError, match=rf"images are {type(images).__name__}; expected a torch\.Tensor of shape"):
        check_images(images, 3)


@pytest.mark.parametrize(
    ("shape", "hint"),
    [((3, 4, 4), r": add the batch dimension with images\[None\]$"), ((4, 4), "$"), ((1, 2, 3, 4, 4), "$"), ((), "$")],
)
def test_rank(shape: tuple[int, ...], hint: str) -> None:
    with pytest.raises(ValueError, match=r"images have shape \(.*\); expected \[N, C, H, W\]" + hint):
        check_images(grey(*shape), 3)


@pytest.mark.parametrize(
    ("dtype", "hint"),
    [(torch.uint8, ": use images.float() / 255"), (torch.int64, ""), (torch.bool, ""), (torch.complex64, "")],
)
def test_dtype(dtype: torch.dtype, hint: str) -> None:
    with pytest.raises(TypeError) as caught:
        check_images(torch.zeros(2, 3, 4, 4, dtype=dtype), 3)
    assert str(caught.value) == f"images are {dtype}; expected floating point in [0, 1]{hint}"


@pytest.mark.parametrize("channels", [0, 1, 4])
def test_channels(channels: int) -> None:
    with pytest.raises(ValueError, match=rf"images have {channels} channels; the model takes 3, by the mean and std"):
        check_images(grey(2, channels, 4, 4), 3)


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 3, 0, 4)])
def test_empty(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"the batch is empty \(shape \(.*\)\); pass at least one image"):
        check_images(grey(*shape), 3)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_non_finite(value: float, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"images contain NaN or infinity \(batch index 7\); drop those images"):
        check_images(with_pixel(value).to(dtype), 3)


def test_non_finite_names_the_first_five() -> None:
    with pytest.raises(ValueError, match=r"\(batch index 1, 2, 3, 4, 5\)"):
        check_images(with_pixel(float("nan"), 7), 3)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (with_pixel(255.0), r"span \[0\.5, 255\]; expected raw pixels in \[0, 1\]\. Divide 8-bit values by 255"),
        (with_pixel(-2.1), r"span \[-2\.1, 0\.5\]; .* Do not normalise them: mean and std belong in ttac\.Classifier"),
        (with_pixel(1.3), r"span \[0\.5, 1\.3\]"),
    ],
)
def test_values_far_outside(images: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_images(images, 3)
