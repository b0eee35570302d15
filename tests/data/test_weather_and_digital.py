"""Weather and digital corruptions, compared with Pillow, SciPy, Matplotlib and plain loops."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage, stats
from torch import Tensor

from references import weather_and_digital as reference
from references.images import cut, natural_images
from references.statistics import pixel_statistics
from ttac.data.corruptions import Corruption, digital, frost, spatter, weather
from ttac.data.corruptions.constants import constants
from ttac.data.corruptions.crystals import frost_textures
from ttac.data.corruptions.frost import PHOTOGRAPHS, FrostPhotographs

NAMES = tuple(reference.REFERENCES)
WITHOUT_CHANCE = ("brightness", "saturate", "contrast", "pixelate", "jpeg_compression")
RANDOM = tuple(name for name in NAMES if name not in WITHOUT_CHANCE)


class Given:
    """Draws that are given, in the order in which they are asked for."""

    def __init__(self, *numbers: NDArray[np.floating]) -> None:
        self.numbers = [torch.from_numpy(array).float() for array in numbers]

    def uniform(self, *shape: int) -> Tensor:
        return self.numbers.pop(0).view(-1, *shape)

    normal = uniform


def to_tensor(images: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


def to_unit(images: NDArray[np.uint8]) -> Tensor:
    return to_tensor(images).float() / 255


def to_levels(results: Tensor) -> NDArray[np.floating]:
    return 255 * results.clamp(0, 1).permute(0, 2, 3, 1).numpy()


def assert_close(ours: NDArray[np.floating], expected: Sequence[NDArray[np.generic]], share: float = 0.0) -> None:
    """Compare levels; a share of the pixels may be on the other side of a threshold in single precision."""
    assert (np.abs(ours - np.stack(expected)) > 0.05).mean() <= share


@pytest.mark.parametrize("name", WITHOUT_CHANCE)
@pytest.mark.parametrize("side", [32, 224])
@pytest.mark.parametrize("severity", [1, 3, 4, 5])
def test_what_has_no_chance_is_the_references(name: str, side: int, severity: int) -> None:
    images = natural_images(3, side, side)
    images[0, :5, :5] = 90  # grey, black and white
    images[0, 5:9, :5] = 0
    images[0, 9:12, :5] = 255
    corrupted = Corruption(name, severity)(to_tensor(images), torch.arange(3)).permute(0, 2, 3, 1).numpy()
    expected = np.stack(
        [
            cut(reference.REFERENCES[name](image, constants(name, severity, side), np.random.default_rng(0)))
            for image in images
        ]
    )
    difference = np.abs(corrupted.astype(int) - expected)
    assert difference.max() <= (0 if name in ("pixelate", "jpeg_compression") else 1)
    assert (difference > 0).mean() < 0.005


@pytest.mark.parametrize("quality", [7, 40, 95])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(8, 8), (17, 9), (48, 40), (33, 47)])
def test_jpeg_is_pillows_to_the_bit(size: tuple[int, int], channels: int, quality: int) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (2, *size, 3), dtype=np.uint8)
    images = np.concatenate([noise, natural_images(2, *size)])[..., :channels]
    ours = to_levels(digital.jpeg_compression(to_unit(images), (quality,), Given())).round()
    for image, result in zip(images, ours, strict=True):
        expected = reference.jpeg_compression(image.squeeze(), (quality,), np.random.default_rng(0))
        np.testing.assert_array_equal(result.squeeze(), expected)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.6, 0.65, 0.85, 0.95])
# Of 19 pixels one is dropped at a half; 85 and 49 have centres on the edge of a box.
@pytest.mark.parametrize("size", [(19, 19), (48, 40), (49, 85), (33, 51)])
def test_pixelate_is_pillows_to_the_bit(size: tuple[int, int], share: float) -> None:
    images = np.random.default_rng(1).integers(0, 256, (1, *size, 3), dtype=np.uint8)
    ours = to_levels(digital.pixelate(to_unit(images), (share,), Given()))
    expected = reference.pixelate(images[0], (share,), np.random.default_rng(0))
    np.testing.assert_array_equal(ours[0].round(), expected)


@pytest.mark.parametrize(("size", "severity"), [((32, 32), s) for s in (1, 2, 3, 5)] + [((48, 40), 4), ((224, 224), 2)])
def test_elastic_transform_of_given_draws_is_the_references(size: tuple[int, int], severity: int) -> None:
    images, rng = natural_images(4, *size), np.random.default_rng(0)
    numbers = constants("elastic_transform", severity, min(size))
    moves, fields = (rng.random((4, *shape)).astype(np.float32) for shape in ((3, 2), (2, *size)))
    ours = to_levels(digital.elastic_transform(to_unit(images), numbers, Given(moves, fields)))
    given = zip(images, moves, fields, strict=True)
    assert_close(ours, [reference.elastic_by(image, numbers, 2 * m - 1, 2 * f - 1) for image, m, f in given])


def test_elastic_transform_of_three_points_in_a_line_is_finite() -> None:
    # Of 32 pixels, the points are 20 apart: the first two at one place, then all three in a line.
    moves = np.array([[[0.5, 0.5 - 1 / 4], [0.5, 0.5 + 1 / 4], [0.5, 0.5]], [[0.5, 0.5], [0.25, 0.75], [0.5, 0.5]]])
    images = to_unit(natural_images(2, 32, 32))
    fields = np.full((2, 2, 32, 32), 0.5)
    assert digital.elastic_transform(images, (1, 1, 20), Given(moves, fields)).isfinite().all()


@pytest.mark.parametrize(("size", "side", "severity"), [((32, 32), 32, 1), ((48, 40), 64, 4), ((224, 224), 256, 5)])
def test_fog_of_given_draws_is_the_references(size: tuple[int, int], side: int, severity: int) -> None:
    images = natural_images(3, *size) // 2
    images[2] = 0
    numbers = constants("fog", severity, min(size))
    noise = np.random.default_rng(0).random((3, side, side)).astype(np.float32)
    ours = to_levels(weather.fog(to_unit(images), numbers, Given(noise)))
    assert_close(ours, [reference.fog_by(image, numbers, 2 * n - 1) for image, n in zip(images, noise, strict=True)])


# Of 16 pixels, flakes would be smaller than a pixel.
@pytest.mark.parametrize(("side", "severity"), [(32, 1), (32, 3), (32, 5), (16, 1), (224, 3)])
def test_snow_of_given_draws_is_the_references(side: int, severity: int) -> None:
    images, rng = natural_images(3, side, side), np.random.default_rng(0)
    numbers = constants("snow", severity, side)
    noise = rng.normal(size=(3, side, side)).astype(np.float32)
    angles = rng.random(3).astype(np.float32)
    ours = to_levels(weather.snow(to_unit(images), numbers, Given(noise, angles)))
    given = zip(images, noise, 90 * angles.astype(float) - 135, strict=True)
    assert_close(ours, [reference.snow_by(image, numbers, *draws) for image, *draws in given], share=0.001)


@pytest.mark.parametrize(
    ("size", "severity"), [((32, 32), s) for s in (1, 2, 3, 4, 5)] + [((48, 40), 3), ((224, 224), 2)]
)
def test_spatter_of_given_draws_is_the_references(size: tuple[int, int], severity: int) -> None:
    images = natural_images(8, *size)
    numbers = constants("spatter", severity, min(size))
    noise = np.random.default_rng(0).normal(size=(8, *size)).astype(np.float32)
    ours = to_levels(spatter.spatter(to_unit(images), numbers, Given(noise)))
    given = zip(images, noise, strict=True)
    assert_close(ours, [reference.spatter_by(image, numbers, n) for image, n in given], share=0.001)


def test_liquid_past_white_begins_again_at_black() -> None:
    images, noise = natural_images(4, 32, 32), np.random.default_rng(0).normal(size=(4, 32, 32)).astype(np.float32)
    numbers = (0.95, 0.3, 1, 0.69, 0.5, 0)
    ours = to_levels(spatter.spatter(to_unit(images), numbers, Given(noise)))
    given = zip(images, noise, strict=True)
    assert_close(ours, [reference.spatter_by(image, numbers, n) for image, n in given], share=0.001)


@pytest.mark.parametrize("smoothness", [0, 0.7, 1.5])
def test_edges_are_cannys(smoothness: float) -> None:
    noise = np.random.default_rng(2).normal(size=(4, 48, 40))
    field = ndimage.gaussian_filter(noise, (0, smoothness, smoothness))
    levels = np.clip(128 + 60 * field / field.std(), 0, 255).astype(int)
    ours = spatter.edges(torch.from_numpy(levels).float()).numpy()
    expected = np.stack([reference.canny(image) for image in levels])
    assert 0.05 < expected.mean() < 0.5
    np.testing.assert_array_equal(ours, expected)


def test_edges_are_followed_to_their_end() -> None:
    allowed = torch.zeros(2, 21, 20, dtype=torch.bool)
    allowed[0, ::2] = True  # a line that winds from row to row, now right, now left
    allowed[0, 1::4, -1] = True
    allowed[0, 3::4, 0] = True
    allowed[1] = torch.rand(21, 20, generator=torch.Generator().manual_seed(0)) < 0.4
    seeds = torch.zeros_like(allowed)
    seeds[0, 0, 0] = True
    seeds[1] = allowed[1] & (torch.rand(21, 20, generator=torch.Generator().manual_seed(1)) < 0.05)
    ours = spatter.linked(seeds, allowed)
    assert ours[0].equal(allowed[0])
    expected = ndimage.binary_propagation(seeds[1].numpy(), np.ones((3, 3)), allowed[1].numpy())
    assert 0 < seeds[1].sum() < expected.sum() < allowed[1].sum()
    np.testing.assert_array_equal(ours[1].numpy(), expected)


@pytest.mark.parametrize("size", [(12, 60), (60, 12)])
def test_distances_are_euclidean_and_end_at_twenty(size: tuple[int, int]) -> None:
    marked = np.random.default_rng(0).random((5, *size)) < np.array([0.3, 0.02, 0.004, 0, 0])[:, None, None]
    marked[3, 0, 0] = True
    expected = np.stack([np.minimum(reference.distances(image), 20) for image in marked])
    assert (expected[4] == 20).all()
    np.testing.assert_allclose(spatter.distances(torch.from_numpy(marked)).numpy(), expected, rtol=1e-6)


def test_equalised_levels_are_opencvs() -> None:
    rng = np.random.default_rng(0)
    levels = np.stack([rng.integers(0, 21, (16, 20)), rng.binomial(20, 0.2, (16, 20)), np.full((16, 20), 7)])
    levels[1, :2] = 20
    ours = spatter.equalised(torch.from_numpy(levels).float()).numpy()
    np.testing.assert_array_equal(ours, np.stack([reference.equalised(image) for image in levels]))


def test_without_a_drop_spatter_changes_nothing() -> None:
    images = to_unit(natural_images(2, 32, 32))
    for mud in (0, 1):
        dry = spatter.spatter(images, (0.1, 0.01, 1, 0.7, 0.6, mud), Given(np.zeros((2, 32, 32))))
        torch.testing.assert_close(dry, images)


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("severity", [2, 5])
def test_random_corruptions_have_the_references_statistics(name: str, severity: int) -> None:
    images, rng = np.tile(natural_images(4, 32, 32), (40, 1, 1, 1)), np.random.default_rng(0)
    ours = Corruption(name, severity)(to_tensor(images), torch.arange(160)).permute(0, 2, 3, 1).numpy()
    numbers = constants(name, severity, 32)
    expected = np.stack([cut(reference.REFERENCES[name](image, numbers, rng)) for image in images])
    both = [pixel_statistics(images, corrupted) for corrupted in (ours, expected)]
    for key in both[0]:
        for image in range(4):  # each image with all its draws
            ours_of, expected_of = (statistics[key][image::4] for statistics in both)
            assert stats.ks_2samp(ours_of, expected_of).pvalue > 1e-4, key


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 32, 32), (3, 48, 40), (1, 40, 48), (3, 8, 8), (3, 9, 90)])
def test_a_sample_has_its_own_draws_whatever_the_batch(name: str, shape: tuple[int, int, int]) -> None:
    channels, height, width = shape
    images = to_tensor(natural_images(6, height, width))[:, :channels].contiguous()
    index = torch.tensor([3, 0, 7, 11, 2, 40])
    for severity in (2, 5):
        corruption = Corruption(name, severity, seed=1)
        whole = corruption(images, index)
        assert whole.shape == images.shape
        # Grey has no saturation that could be multiplied, but severity 5 adds to it.
        assert whole.equal(images) == (name == "saturate" and channels == 1 and severity == 2)
        order = torch.tensor([4, 1, 5])
        parts = torch.cat([corruption(images[rows], index[rows]) for rows in order.split(2)])
        assert parts.equal(whole[order])


@pytest.mark.parametrize("name", RANDOM)
def test_index_seed_and_severity_change_the_draws(name: str) -> None:
    image = to_tensor(natural_images(1, 32, 32))
    first = Corruption(name, 3, seed=0)(image, torch.tensor([5]))
    strength = constants(name, 3, 32)  # at every severity, so that nothing but the draws differs
    for seed, severity, index in ((0, 3, 6), (1, 3, 5), (0, 1, 5), (0, 5, 5)):
        assert not first.equal(Corruption(name, severity, seed, strength=strength)(image, torch.tensor([index])))
    assert first.equal(Corruption(name, 3, seed=0, strength=strength)(image, torch.tensor([5])))


@pytest.mark.parametrize("name", NAMES)
def test_grey_is_the_luma_of_three_equal_channels(name: str) -> None:
    grey = to_tensor(natural_images(6, 32, 32))[:, :1]
    for severity in (2, 5):
        corruption = Corruption(name, severity)
        ours = corruption(grey, torch.arange(6)).double()
        coloured = corruption(grey.expand(-1, 3, -1, -1).contiguous(), torch.arange(6)).double()
        luma = torch.einsum("nchw,c->nhw", coloured, torch.tensor([0.299, 0.587, 0.114]).double())
        # JPEG codes grey without chroma, which rounds its own way.
        assert (ours[:, 0] - luma).abs().max() <= (2 if name == "jpeg_compression" else 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("level", [0, 255])
def test_black_and_white_images_stay_numbers(name: str, level: int) -> None:
    flat = torch.full((4, 3, 32, 32), level / 255)
    for severity in (1, 2, 3, 4, 5):
        rng = np.random.default_rng(severity)
        draws = {
            "elastic_transform": (rng.random((4, 3, 2)), rng.random((4, 2, 32, 32))),
            "fog": (rng.random((4, 32, 32)),),
            "snow": (rng.normal(size=(4, 32, 32)), rng.random(4)),
            "frost": (rng.random((4, 3)),),
            "spatter": (rng.normal(size=(4, 32, 32)),),
        }.get(name, ())
        module = next(module for module in (digital, spatter, weather) if hasattr(module, name))
        assert getattr(module, name)(flat, constants(name, severity, 32), Given(*draws)).isfinite().all()


def test_frost_textures_are_like_photographs() -> None:
    for texture in frost_textures():
        picture = texture.double().numpy() / 255
        red, green, blue = picture.mean((1, 2))
        assert 0.45 <= red <= green <= blue <= 0.56
        assert 0.2 <= picture.std() <= 0.25
        power = np.abs(np.fft.fft2(picture.mean(0) - picture.mean())) ** 2
        radius = np.hypot(*np.meshgrid(*[np.fft.fftfreq(side) * side for side in power.shape])).astype(int)
        amplitude = np.sqrt(np.bincount(radius.ravel(), power.ravel()) / np.bincount(radius.ravel()))
        slope = stats.linregress(np.log(np.arange(4, 400)), np.log(amplitude[4:400])).slope
        assert -1.5 < slope < -0.9  # about 1 / f


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """Six pictures that tell by their colour which one they are, and by their gradients which part of it."""
    for number, name in enumerate([*PHOTOGRAPHS, "frost6.jpg"]):
        rows, columns = np.mgrid[: 300 + 10 * number, :400]
        picture = np.stack([np.full(rows.shape, 40 * number), rows // 2, columns // 2], -1).astype(np.uint8)
        Image.fromarray(picture).save(tmp_path / name, **({"quality": 100} if name.endswith("jpg") else {}))
    return tmp_path


@pytest.mark.parametrize(("side", "step"), [(32, 5), (224, 1)])
def test_frost_is_a_random_crop_of_the_first_five_photographs(photographs: Path, side: int, step: int) -> None:
    corruption = Corruption("frost", 3, photographs=FrostPhotographs.read(photographs))
    black = torch.zeros(60, 3, side, side, dtype=torch.uint8)
    weight = constants("frost", 3, side)[1]
    numbers, rows, columns = corruption(black, torch.arange(60)).double().div(weight).unbind(1)
    chosen = (numbers.mean((1, 2)) / 40).round()
    assert set(chosen.tolist()) == {0, 1, 2, 3, 4}
    # Every fifth pixel of photographs of 32, every one of 224; a level is two pixels of the photograph.
    for gradient, dim in ((rows, 1), (columns, 2)):
        first, last = gradient.mean(3 - dim)[:, 0], gradient.mean(3 - dim)[:, -1]
        torch.testing.assert_close(
            (last - first) * 2 / (side - 1), torch.full((60,), float(step)).double(), atol=0.2, rtol=0
        )
        assert len(first.round().unique()) > 20


def test_photographs_are_scaled_once_for_sizes_that_take_turns(photographs: Path) -> None:
    corruption = Corruption("frost", photographs=FrostPhotographs.read(photographs))
    frost._scaled.cache_clear()
    for side in (32, 40, 48, 64) * 3:
        corruption(torch.zeros(1, 3, side, side, dtype=torch.uint8), torch.arange(1))
    assert frost._scaled.cache_info().misses == 4


def test_photographs_are_known_by_their_content(photographs: Path) -> None:
    first = FrostPhotographs.read(photographs)
    assert first == FrostPhotographs.read(str(photographs))
    assert hash(first) == hash(FrostPhotographs.read(photographs))
    (photographs / "frost6.jpg").unlink()  # never used
    assert Corruption("frost", photographs=first) == Corruption("frost", photographs=FrostPhotographs.read(photographs))
    Image.new("RGB", (300, 300), "white").save(photographs / "frost2.png")
    other = FrostPhotographs.read(photographs)
    assert first != other
    assert Corruption("frost", photographs=first).notes(32) != Corruption("frost", photographs=other).notes(32)
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.fingerprint = "another"  # type: ignore[misc]


@pytest.mark.parametrize("size", [(40, 96), (96, 40)])
def test_small_photographs_are_enlarged_to_cover_an_image(tmp_path: Path, size: tuple[int, int]) -> None:
    for number, name in enumerate(PHOTOGRAPHS):
        Image.new("RGB", ((30, 20), (20, 30))[number % 2], (100, 120, 140)).save(tmp_path / name)
    corruption = Corruption("frost", 1, photographs=FrostPhotographs.read(tmp_path))
    frosted = corruption(torch.zeros(20, 3, *size, dtype=torch.uint8), torch.arange(20))
    assert (frosted.float().std((2, 3)) < 0.5).all()
    assert (frosted.amin((2, 3)) > 0).all()


def test_missing_and_broken_photographs_are_named(photographs: Path) -> None:
    (photographs / "frost4.jpg").write_bytes((photographs / "frost4.jpg").read_bytes()[:300])
    with pytest.raises(ValueError, match=r"frost4\.jpg cannot be read"):
        FrostPhotographs.read(photographs)
    (photographs / "frost4.jpg").unlink()
    (photographs / "frost1.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks frost1\.png, frost4\.jpg"):
        FrostPhotographs.read(photographs)
    with pytest.raises(FileNotFoundError, match=r"frost5\.jpg"):
        FrostPhotographs.read(photographs / "nowhere")
