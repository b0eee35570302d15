"""Views against Pillow on 8-bit images, SciPy's affine resampling, NumPy slices and plain loops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import get_args

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from scipy import ndimage
from torch import Tensor

from ttac.model.views import OPERATIONS, StrongView, apply_operations, random_crop, strong_view, weak_view

HEIGHT, WIDTH = 24, 44  # not square, so that a swap of the sides shows
LEVEL = 1 / 255
ALL_VIEWS: tuple[Callable[..., Tensor], ...] = (
    partial(weak_view, flip=True, crop=True),
    *(partial(strong_view, flip=True, kind=kind) for kind in get_args(StrongView)),
)


def photographs(count: int, channels: int = 3, height: int = HEIGHT, width: int = WIDTH) -> Tensor:
    """Smooth uint8 images whose channels differ in range and histogram, the last one with a flat channel."""
    rng = np.random.default_rng(0)
    noise = ndimage.gaussian_filter(rng.normal(size=(count, channels, height, width)), (0, 0, 1.5, 1.5))
    scale = rng.uniform(100, 500, size=(count, channels, 1, 1))
    images = torch.from_numpy((noise * scale + 120).clip(0, 255).astype(np.uint8))
    images[-1, -1] = 77
    return images


def apply_one(name: str, images: Tensor, magnitude: int) -> Tensor:
    """Apply one operation at one signed magnitude to every uint8 image, as float32."""
    drawn = torch.full((len(images),), OPERATIONS.index(name))
    return apply_operations(images.float() / 255, drawn, torch.full((len(images),), magnitude))


def by_pillow(images: Tensor, operation: Callable[[Image.Image], Image.Image]) -> Tensor:
    """Apply `operation` to every uint8 image by itself, as float32 in [0, 1]."""
    arrays = [np.asarray(operation(Image.fromarray(image.permute(1, 2, 0).numpy()))) for image in images]
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).float() / 255


def channel_by_channel(
    images: Tensor, resample: Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]
) -> Tensor:
    """Apply `resample` to every channel of every uint8 image by itself, as float32 in [0, 1]."""
    planes = (images.float() / 255).flatten(0, 1).numpy()
    return torch.from_numpy(np.stack([resample(plane) for plane in planes])).view(images.shape)


def output_to_input(
    name: str, magnitude: int, height: int = HEIGHT, width: int = WIDTH
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Matrix and offset in (x, y) from output to input coordinates, the origin at the top left corner of the image."""
    cos, sin = np.cos(np.deg2rad(magnitude)), np.sin(np.deg2rad(magnitude))
    matrix = {
        "ShearX": np.array([[1, magnitude / 100], [0, 1]]),
        "ShearY": np.array([[1, 0], [magnitude / 100, 1]]),
        "Rotate": np.array([[cos, -sin], [sin, cos]]),
    }[name]
    kept = np.array([width, height]) / 2 if name == "Rotate" else np.zeros(2)
    return matrix, kept - matrix @ kept


def test_operations_are_the_fourteen_of_randaugment() -> None:
    geometric = "ShearX ShearY TranslateX TranslateY Rotate"
    photometric = "Brightness Color Contrast Sharpness Posterize Solarize AutoContrast Equalize"
    assert list(OPERATIONS) == ["Identity", *geometric.split(), *photometric.split()]


def test_identity_changes_nothing() -> None:
    images = photographs(3)
    assert torch.equal(apply_one("Identity", images, 10), images.float() / 255)


@pytest.mark.parametrize("name", ["Brightness", "Color", "Contrast", "Sharpness"])
@pytest.mark.parametrize("magnitude", [-30, -10, 10, 30])
def test_enhancements_equal_pillow(name: str, magnitude: int) -> None:
    images = photographs(6)
    reference = by_pillow(images, lambda image: getattr(ImageEnhance, name)(image).enhance(1 + 0.9 * magnitude / 30))
    # Pillow rounds the degenerate image to a level, of which up to 0.9 enters, and then drops the fraction.
    difference = apply_one(name, images, magnitude) - reference
    assert difference.min() > -0.46 * LEVEL
    assert difference.max() < 1.46 * LEVEL


@pytest.mark.parametrize(("magnitude", "bits"), [(0, 8), (10, 7), (-10, 7), (20, 5), (30, 4)])
def test_posterize_equals_pillow(magnitude: int, bits: int) -> None:
    images = photographs(4)
    assert torch.equal(
        apply_one("Posterize", images, magnitude), by_pillow(images, lambda i: ImageOps.posterize(i, bits))
    )


@pytest.mark.parametrize(("magnitude", "threshold"), [(0, 255), (10, 170), (-10, 170), (11, 162), (30, 0)])
def test_solarize_equals_pillow(magnitude: int, threshold: int) -> None:
    images = photographs(4)
    images[0, 0, 0, :5] = torch.tensor([161, 162, 169, 170, 255])
    reference = by_pillow(images, lambda image: ImageOps.solarize(image, threshold))
    assert torch.equal(apply_one("Solarize", images, magnitude), reference)


def test_autocontrast_equals_pillow() -> None:
    images = photographs(20)
    difference = apply_one("AutoContrast", images, 10) - by_pillow(images, ImageOps.autocontrast)
    # Pillow's floats fall just below some whole numbers.
    assert difference.min() >= 0
    assert difference.max() < 1.01 * LEVEL
    assert (difference > 0).float().mean() < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocontrast_is_exact_for_every_span_and_level(dtype: torch.dtype) -> None:
    # One row of pixels for each brightest level, from the darkest one to it.
    rows = [torch.arange(256).clamp(low, high) for low in (0, 41) for high in range(low + 1, 256)]
    expected = [255 * (row - row.min()) // (row.max() - row.min()) for row in rows]
    images = torch.stack(rows)[:, None, None].to(dtype) / 255
    drawn = torch.full((len(images),), OPERATIONS.index("AutoContrast"))
    result = apply_operations(images, drawn, torch.full((len(images),), 10))
    assert torch.equal(result, torch.stack(expected)[:, None, None].to(dtype) / 255)


@pytest.mark.parametrize(("height", "width"), [(32, 32), (24, 40), (8, 8), (100, 90)])
def test_equalize_equals_pillow(height: int, width: int) -> None:
    images = photographs(20, height=height, width=width)
    images[0, :, : height // 2] = (
        255  # the brightest level, which the rule leaves out of the count, is most of the image
    )
    images[1, 0, :, 1:] = 3
    assert torch.equal(apply_one("Equalize", images, 10), by_pillow(images, ImageOps.equalize))


@pytest.mark.parametrize("name", ["ShearX", "ShearY", "Rotate"])
@pytest.mark.parametrize("magnitude", [-30, -10, 10, 30])
@pytest.mark.parametrize(("height", "width"), [(HEIGHT, WIDTH), (32, 32), (9, 7), (60, 224)])
def test_shear_and_rotation_equal_scipy_on_the_whole_image(name: str, magnitude: int, height: int, width: int) -> None:
    matrix, offset = output_to_input(name, magnitude, height, width)
    centre = np.full(2, 0.5)  # SciPy counts from the centre of the first pixel
    row_matrix, row_offset = matrix[::-1, ::-1], (matrix @ centre + offset - centre)[::-1]
    images = photographs(3, height=height, width=width)
    reference = channel_by_channel(
        images, lambda plane: ndimage.affine_transform(plane, row_matrix, row_offset, order=1, mode="grid-constant")
    )
    torch.testing.assert_close(apply_one(name, images, magnitude), reference, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["ShearX", "ShearY", "Rotate"])
@pytest.mark.parametrize("magnitude", [-10, 10])
def test_shear_and_rotation_equal_pillow_inside(name: str, magnitude: int) -> None:
    level = magnitude / 100

    def resample(plane: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        image = Image.fromarray(plane)
        if name == "Rotate":
            return np.asarray(image.rotate(magnitude, Image.Resampling.BILINEAR))
        rows = (1, level, 0, 0, 1, 0) if name == "ShearX" else (1, 0, 0, level, 1, 0)
        return np.asarray(image.transform(image.size, Image.Transform.AFFINE, rows, Image.Resampling.BILINEAR))

    matrix, offset = output_to_input(name, magnitude)
    columns, rows = np.meshgrid(np.arange(WIDTH) + 0.5, np.arange(HEIGHT) + 0.5)
    x, y = np.moveaxis(np.stack([columns, rows], -1) @ matrix.T + offset, -1, 0)
    # Pillow repeats the edge and grid_sample blends it with black, within one pixel of the border.
    inside = torch.from_numpy((x > 1) & (x < WIDTH - 1) & (y > 1) & (y < HEIGHT - 1))
    assert inside.float().mean() > 0.6
    images = photographs(3)
    result, reference = apply_one(name, images, magnitude), channel_by_channel(images, resample)
    torch.testing.assert_close(result[..., inside], reference[..., inside], atol=1e-3, rtol=0)


@pytest.mark.parametrize(("magnitude", "rows", "columns"), [(10, 3, 6), (-10, -3, -6), (30, 10, 19)])
def test_translations_move_whole_pixels_and_leave_black(magnitude: int, rows: int, columns: int) -> None:
    # 150 / 331 of 24 and 44 pixels are 10.9 and 19.9, and a third of them 3.6 and 6.6.
    images = photographs(3)

    def shifted(y: int, x: int) -> Tensor:
        return channel_by_channel(images, lambda plane: ndimage.shift(plane, (y, x), order=0))

    torch.testing.assert_close(apply_one("TranslateX", images, magnitude), shifted(0, columns), atol=1e-5, rtol=0)
    torch.testing.assert_close(apply_one("TranslateY", images, magnitude), shifted(rows, 0), atol=1e-5, rtol=0)


def test_mixed_batch_equals_each_image_alone() -> None:
    images = photographs(2 * len(OPERATIONS)).float() / 255
    drawn = torch.arange(len(OPERATIONS)).repeat(2)
    magnitudes = torch.tensor([10, -10]).repeat_interleave(len(OPERATIONS))
    together = apply_operations(images, drawn, magnitudes)
    alone = [apply_operations(images[[i]], drawn[[i]], magnitudes[[i]]) for i in range(len(images))]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-6, rtol=0)


def test_autocast_leaves_the_geometry_alone() -> None:
    images = photographs(2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = apply_one("Rotate", images, 10)
    assert torch.equal(under_autocast, apply_one("Rotate", images, 10))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3, 24, 44), (1, 27, 24), (4, 32, 32), (3, 3, 2)])
def test_crop_equals_a_loop_over_reflected_images(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    channels, height, width = shape
    padding = min(height - 1, width - 1, 3)  # 3 is an eighth of 24
    images = photographs(9, channels, height, width).to(dtype)
    shifts = torch.randint(0, 2 * padding + 1, (2, 9), generator=torch.Generator().manual_seed(3))
    expected = []
    for image, top, left in zip(images.double().numpy(), *shifts.tolist(), strict=True):
        padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)), mode="reflect")
        expected.append(torch.from_numpy(padded[:, top : top + height, left : left + width].copy()).to(dtype))
    assert torch.equal(random_crop(images, torch.Generator().manual_seed(3), padding=padding), torch.stack(expected))
    if min(height, width) == 24:
        weak = weak_view(images, torch.Generator().manual_seed(3), flip=False, crop=True)
        assert torch.equal(weak, torch.stack(expected))


def test_shift_further_than_an_image_reaches_is_refused() -> None:
    with pytest.raises(ValueError, match="padding 4 needs images larger than that on both sides, not 8 x 4"):
        random_crop(torch.zeros(1, 3, 8, 4), torch.Generator())


def test_weak_view_mirrors_about_half_of_the_images_and_only_if_asked() -> None:
    images = torch.rand(400, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    view = weak_view(images, torch.Generator().manual_seed(0), flip=True, crop=False)
    mirrored = (view == images.flip(-1)).flatten(1).all(1)
    kept = (view == images).flatten(1).all(1)
    assert (mirrored ^ kept).all()
    assert 150 < mirrored.sum() < 250
    assert torch.equal(weak_view(images, torch.Generator(), flip=False, crop=False), images)


def test_every_image_has_its_own_draw_and_all_operations_occur() -> None:
    image = photographs(1).float() / 255
    images = image.expand(2000, -1, -1, -1)
    # At 8 pixels an eighth is one pixel: 9 shifts x (14 operations, 9 of them with two directions).
    fixed = partial(strong_view, flip=False, kind="own-range", operations=1, magnitude=30)
    views = fixed(images[..., :8, :8], torch.Generator().manual_seed(0))
    distinct = len(np.unique(views.flatten(1).numpy(), axis=0))
    assert distinct > 9 * 15
    assert distinct <= 9 * 23


def test_a_faint_image_stays_as_faint_as_it_was() -> None:
    images = torch.rand(200, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    images[:, :, 0, 0], images[:, :, 0, 1] = 0, 1
    faint = 0.4 + 0.1 * images
    view = partial(strong_view, flip=True, kind="own-range")
    strong, weak = (view(x, torch.Generator().manual_seed(1)) for x in (images, faint))
    torch.testing.assert_close(weak, 0.4 + 0.1 * strong, atol=2e-3, rtol=0)  # levels are rounded elsewhere
    constant = torch.full((20, 3, 8, 8), 0.3)
    assert float((view(constant, torch.Generator().manual_seed(1)) - 0.3).abs().max()) <= 1 / 255


@pytest.mark.parametrize(
    ("operations", "shares"),
    [(1, {1.3: 1 / 28, 0.7: 1 / 28}), (2, {1.3**2: 1 / 28**2, 1.3 * 0.7: 2 / 28**2, 0.7**2: 1 / 28**2})],
)
def test_operations_and_signs_are_drawn_uniformly_with_replacement(operations: int, shares: dict[float, float]) -> None:
    # In the middle of a grey image of one channel only brightness changes more than one level; two pixels that no shift
    # moves out, or there, give it the whole range.
    images = torch.full((40000, 1, 24, 24), 85 / 255)
    images[:, :, 3, 20], images[:, :, 20, 3] = 0, 1
    generator = torch.Generator().manual_seed(0)
    views = strong_view(images, generator, flip=True, kind="own-range", operations=operations)
    ratio = views[:, 0, 12, 12] / images[:, 0, 12, 12]
    for factor, expected in shares.items():
        share = ((ratio - factor).abs() < 0.02).float().mean().item()
        assert share == pytest.approx(expected, abs=4 * (expected / len(images)) ** 0.5)  # four standard errors


@pytest.mark.parametrize("view", ALL_VIEWS)
def test_views_repeat_with_the_seed_and_leave_input_and_global_generator_alone(view: Callable[..., Tensor]) -> None:
    images = photographs(64).float() / 255
    before, state = images.clone(), torch.get_rng_state()
    first = view(images, torch.Generator().manual_seed(5))
    assert torch.equal(first, view(images, torch.Generator().manual_seed(5)))
    assert not torch.equal(first, view(images, torch.Generator().manual_seed(6)))
    assert torch.equal(images, before)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("layout", ["channels-last", "part of larger images", "sides swapped", "one image repeated"])
def test_views_do_not_depend_on_the_layout_in_memory(layout: str, channels: int) -> None:
    images = photographs(64, channels).float() / 255
    if layout == "channels-last":
        images = images.contiguous(memory_format=torch.channels_last)
    elif layout == "part of larger images":
        images = images[:, :, 1::2, ::3]
    elif layout == "sides swapped":
        images = images.transpose(2, 3)
    else:
        images = images[:1].expand(64, -1, -1, -1)
    for view in ALL_VIEWS:
        same, reference = (
            view(x, torch.Generator().manual_seed(5))
            for x in (images, images.clone(memory_format=torch.contiguous_format))
        )
        assert torch.equal(same, reference)
        assert same.stride() == reference.stride()


@pytest.mark.parametrize("kind", get_args(StrongView))
@pytest.mark.parametrize(("height", "width"), [(1, 1), (2, 5), (3, 3)])
def test_tiny_images_have_views_too(height: int, width: int, kind: StrongView) -> None:
    photos = photographs(200, 3, height, width)
    images = photos.float() / 255
    view = strong_view(images, torch.Generator().manual_seed(0), flip=True, kind=kind, magnitude=30)
    assert view.shape == images.shape
    assert 0 <= view.min() <= view.max() <= 1
    if height < 3:  # all border
        assert torch.equal(apply_one("Sharpness", photos, 30), images)


@pytest.mark.parametrize("name", OPERATIONS[: OPERATIONS.index("Posterize")])
def test_gradients_equal_finite_differences(name: str) -> None:
    images = 0.4 + 0.2 * torch.rand(2, 3, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn, magnitudes = torch.full((2,), OPERATIONS.index(name)), torch.tensor([10, -10])
    assert torch.autograd.gradcheck(lambda x: apply_operations(x, drawn, magnitudes), images.requires_grad_())


@pytest.mark.parametrize("kind", get_args(StrongView))
def test_strong_view_passes_gradients_on(kind: StrongView) -> None:
    images = (photographs(64).float() / 255).requires_grad_()
    strong_view(images, torch.Generator().manual_seed(0), flip=True, kind=kind).sum().backward()
    assert images.grad is not None
    assert images.grad.isfinite().all()
    # Levels, which four of the fourteen operations make, have no gradient; the range that an image keeps has one.
    assert (images.grad.abs().sum((1, 2, 3)) > 0).float().mean() > 0.6


@pytest.mark.parametrize("kind", get_args(StrongView))
def test_strong_view_of_an_image_does_not_depend_on_the_others(kind: StrongView) -> None:
    images = photographs(64).float() / 255
    others = images.flip(0).clone()
    others[::2] = images[::2]
    first = strong_view(images, torch.Generator().manual_seed(7), flip=True, kind=kind)
    second = strong_view(others, torch.Generator().manual_seed(7), flip=True, kind=kind)
    assert torch.equal(first[::2], second[::2])


@pytest.mark.parametrize("kind", get_args(StrongView))
@pytest.mark.parametrize("channels", [1, 2, 3, 5])
@pytest.mark.parametrize("magnitude", [0, 10, 30])
def test_strong_view_keeps_shape_and_range(channels: int, magnitude: int, kind: StrongView) -> None:
    images = photographs(128, channels).float() / 255
    generator = torch.Generator().manual_seed(0)
    view = strong_view(images, generator, flip=True, kind=kind, operations=3, magnitude=magnitude)
    assert view.shape == images.shape
    assert view.min() >= 0
    assert view.max() <= 1


def test_color_is_an_identity_on_one_channel() -> None:
    images = photographs(4, channels=1)
    assert torch.equal(apply_one("Color", images, -30), images.float() / 255)


@pytest.mark.parametrize("kind", get_args(StrongView))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_equals_rounded_single_precision(dtype: torch.dtype, kind: StrongView) -> None:
    images = (photographs(128).float() / 255).to(dtype)
    view = strong_view(images, torch.Generator().manual_seed(0), flip=True, kind=kind)
    reference = strong_view(images.float(), torch.Generator().manual_seed(0), flip=True, kind=kind)
    assert torch.equal(view, reference.to(dtype))
    assert weak_view(images, torch.Generator(), flip=True, crop=True).dtype == dtype


@pytest.mark.parametrize("kind", get_args(StrongView))
def test_double_precision_equals_single_precision(kind: StrongView) -> None:
    # One operation: after a first one, single precision may round a tie between two levels to the other side.
    images = photographs(128).float() / 255
    view = strong_view(images.double(), torch.Generator().manual_seed(0), flip=True, kind=kind, operations=1)
    reference = strong_view(images, torch.Generator().manual_seed(0), flip=True, kind=kind, operations=1)
    torch.testing.assert_close(view, reference.double(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", get_args(StrongView))
def test_what_no_view_can_have_is_refused(kind: StrongView) -> None:
    view = partial(strong_view, torch.zeros(1, 3, 8, 8), torch.Generator(), flip=False, kind=kind)
    with pytest.raises(ValueError, match="magnitude 31"):
        view(magnitude=31)
    with pytest.raises(ValueError, match=r"strength must be from 0 to 1, not 1\.5"):
        view(strength=1.5)


@pytest.mark.parametrize("channels", [1, 3])
def test_shifted_images_have_the_strides_of_their_layout(channels: int) -> None:
    shifted = random_crop(torch.rand(2, channels, 8, 8), torch.Generator())
    assert shifted.stride() == (channels * 64, 64, 8, 1)
