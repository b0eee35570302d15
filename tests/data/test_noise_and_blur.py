"""The four kinds of noise and the five of blur, compared with SciPy, plain loops and the distributions."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import ndimage, stats
from torch import Tensor

from references import noise_and_blur as reference
from references.images import natural_images
from ttac.data.corruptions import CORRUPTIONS, EXTRA, Corruption, blur, filters
from ttac.data.corruptions.constants import LARGE, SEVERITIES, SMALL, constants
from ttac.data.corruptions.draws import Draws
from ttac.data.corruptions.filters import clipped_zoom, gaussian_filter, motion_blur_along
from ttac.data.corruptions.noise import poisson_table

CPU = torch.device("cpu")
NAMES = tuple(reference.REFERENCES)
CASES = [(32, 1), (32, 3), (32, 4), (32, 5), (224, 4), (224, 5)]


class Given:
    """Draws of which the uniform numbers are given."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    def uniform(self, *shape: int) -> Tensor:
        return self.numbers.view(-1, *shape).clone()


def to_tensor(images: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


def to_levels(result: NDArray[np.floating] | Tensor) -> NDArray[np.uint8]:
    """Cut to whole levels, [H, W, 3] in [0, 255] or [C, H, W] in [0, 1]."""
    values = 255 * result.permute(1, 2, 0).double().numpy() if isinstance(result, Tensor) else result
    return (np.clip(values, 0, 255) + 2e-4).astype(np.uint8)


def assert_same_levels(ours: NDArray[np.uint8], expected: NDArray[np.uint8]) -> None:
    """Where a value is just at a level, double precision may be above and single precision below."""
    difference = np.abs(ours.astype(int) - expected)
    assert difference.max() <= 1
    assert (difference > 0).mean() < 0.005


@pytest.mark.parametrize("name", ["defocus_blur", "zoom_blur", "gaussian_blur"])
@pytest.mark.parametrize(("side", "severity"), CASES)
def test_blur_without_chance_is_the_references(name: str, side: int, severity: int) -> None:
    images = natural_images(2, side, side)
    numbers = constants(name, severity, side)
    ours = getattr(blur, name)(to_tensor(images).float() / 255, numbers, Given(torch.zeros(0)))
    for image, result in zip(images, ours, strict=True):
        expected = reference.REFERENCES[name](image, numbers, np.random.default_rng(0))
        assert_same_levels(to_levels(result), to_levels(expected))


@pytest.mark.parametrize(("side", "severity"), CASES)
def test_motion_blur_at_an_angle_is_the_references(side: int, severity: int) -> None:
    images = natural_images(4, side, side)
    angles = torch.tensor([-44.0, -7.3, 0.0, 30.0])
    numbers = constants("motion_blur", severity, side)
    ours = blur.motion_blur(to_tensor(images).float() / 255, numbers, Given((angles + 45) / 90))
    for image, result, angle in zip(images, ours, angles.tolist(), strict=True):
        assert_same_levels(to_levels(result), to_levels(reference.motion_blur_at(image, numbers, angle)))


@pytest.mark.parametrize(("side", "severity"), CASES)
def test_glass_blur_with_given_displacements_is_the_references(side: int, severity: int) -> None:
    image = natural_images(1, side, side)
    sigma, reach, times = constants("glass_blur", severity, side)
    displacements = _displacements(1, int(times), int(reach), side, side)
    # The whole of 2 reach u is the displacement down, the fraction of it the displacement across.
    cells = 2 * reach * (displacements[..., 0] + reach) + displacements[..., 1] + reach
    drawn = Given((cells + 0.5).float() / (2 * reach) ** 2)
    ours = blur.glass_blur(to_tensor(image).float() / 255, (sigma, reach, times), drawn)[0]
    expected = reference.glass_blur_by(image[0], sigma, int(reach), displacements[0].numpy())
    assert_same_levels(to_levels(ours), to_levels(expected))


def _displacements(count: int, rounds: int, reach: int, height: int, width: int) -> Tensor:
    size = (count, rounds, height - 2 * reach, width - 2 * reach, 2)
    return torch.randint(-reach, reach, size, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("reach", [1, 2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_glass_copies_in_the_published_order(reach: int, rounds: int) -> None:
    height, width = 22, 19
    displacements = _displacements(2, rounds, reach, height, width)
    shifts = (width * displacements[..., 0] + displacements[..., 1]).float()
    ours = blur.glass(shifts, reach, height, width).view(2, height, width)
    for sample in range(2):
        expected = np.arange(height * width).reshape(height, width)
        for turn in range(rounds):
            for y in range(height - reach, reach, -1):
                for x in range(width - reach, reach, -1):
                    down, across = displacements[sample, turn, y - reach - 1, x - reach - 1].tolist()
                    expected[y, x] = expected[y + down, x + across]
        np.testing.assert_array_equal(ours[sample].numpy(), expected)


def test_glass_displacements_are_uniform() -> None:
    # Without smoothing, what a pixel has is where it is from: the row in one channel, the column in the other.
    places = torch.stack(torch.meshgrid(torch.arange(48.0), torch.arange(40.0), indexing="ij")).expand(400, 2, 48, 40)
    taken = blur.glass_blur(places / 255, (0.0, 2.0, 1.0), Draws(0, "glass", torch.arange(400), CPU))
    # The pixel whose turn comes first, as nothing has been copied before.
    down, across = (255 * taken - places)[:, :, 46, 38].round().long().T
    counts = torch.bincount(4 * (down + 2) + across + 2, minlength=16)
    assert len(counts) == 16
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


@pytest.mark.parametrize(("height", "width"), [(32, 32), (48, 40)])
@pytest.mark.parametrize(
    ("sigma", "truncate", "mode"),
    [(0.05, 4, "nearest"), (0.4, 4, "nearest"), (6, 4, "nearest"), (1.3, 3, "reflect"), (170.8, 3, "reflect")],
)
def test_gaussian_filter_is_scipys(height: int, width: int, sigma: float, truncate: float, mode: str) -> None:
    images = np.random.default_rng(0).random((2, 3, height, width))
    ours = gaussian_filter(torch.from_numpy(images).float(), sigma, truncate=truncate, mode=mode)
    expected = ndimage.gaussian_filter(images, (0, 0, sigma, sigma), truncate=truncate, mode=mode)
    np.testing.assert_allclose(ours.numpy(), expected, atol=1e-6)


@pytest.mark.parametrize(("height", "width"), [(32, 32), (48, 40), (224, 224)])
@pytest.mark.parametrize("factor", [1.0, 1.01, 1.25, 2.25])
def test_clipped_zoom_is_scipys(height: int, width: int, factor: float) -> None:
    image = np.random.default_rng(0).random((height, width, 3))
    ours = clipped_zoom(torch.from_numpy(image).permute(2, 0, 1)[None], factor)[0].permute(1, 2, 0)
    np.testing.assert_allclose(ours.numpy(), reference.clipped_zoom(image, factor), atol=1e-9)


def test_clipped_zoom_below_one_changes_nothing() -> None:
    images = torch.rand(1, 1, 9, 8)
    assert clipped_zoom(images, 0.5).equal(images)


def test_zoom_blur_without_a_table_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.rand(2, 3, 20, 24)
    tabled = blur.zoom_blur(images, (1.16, 0.03), Given(torch.zeros(2)))
    monkeypatch.setattr(blur, "_LARGEST_TABLE", 0)
    torch.testing.assert_close(tabled, blur.zoom_blur(images, (1.16, 0.03), Given(torch.zeros(2))))


def test_motion_blur_reads_along_the_angle_and_cuts_faint_taps_alone() -> None:
    point = torch.zeros(3, 1, 9, 9)
    point[:, :, 4, 4] = 1
    blurred = motion_blur_along(point, 3, 1, torch.tensor([0.0, 90.0, -135.0]))
    tail = torch.exp(-0.5 * torch.arange(7.0) ** 2)
    tail /= tail.sum()
    torch.testing.assert_close(blurred[0, 0, 4, :5].flip(0), tail[:5], atol=1e-6, rtol=0)
    torch.testing.assert_close(blurred[1, 0, :5, 4].flip(0), tail[:5], atol=1e-6, rtol=0)
    # Along a diagonal, taps 1 and 2 are 0.7 and 1.4 pixels away and read the same pixel.
    diagonal = torch.stack([tail[0], tail[1] + tail[2], tail[3], tail[4], tail[5] + tail[6]])
    torch.testing.assert_close(blurred[2, 0].diagonal()[4:], diagonal, atol=1e-6, rtol=0)
    torch.testing.assert_close(blurred.sum((1, 2, 3)), torch.ones(3))


@pytest.mark.parametrize("channels", [1, 3])
def test_motion_blur_of_a_large_image_reads_it_in_parts(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    image = torch.rand(1, channels, 1024, 1024, generator=torch.Generator().manual_seed(0))
    sizes, bag = [], filters.F.embedding_bag

    def noted(read: Tensor, pixels: Tensor, mode: str, per_sample_weights: Tensor) -> Tensor:
        sizes.append(max(read.numel(), per_sample_weights.untyped_storage().nbytes() // 4))
        return bag(read, pixels, mode=mode, per_sample_weights=per_sample_weights)

    monkeypatch.setattr(filters.F, "embedding_bag", noted)
    results = []
    for limit in (filters._READ_AT_ONCE, 100_000, 1 << 40):
        monkeypatch.setattr(filters, "_READ_AT_ONCE", limit)
        sizes.clear()
        results.append(motion_blur_along(image, 10, 8, torch.tensor([20.0])))
        assert max(sizes) <= limit
    assert results[0].equal(results[2])
    assert results[1].equal(results[2])


@pytest.mark.parametrize(("count", "size"), [(3, (13, 7)), (5, (7, 13))])
def test_motion_blur_is_the_same_however_it_is_split(
    count: int, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    images, angles = torch.rand(count, 3, *size), torch.linspace(-45, 45, count)
    whole = motion_blur_along(images, 3, 2, angles)
    for limit in (0, 200, 7 * 91, 7 * 91 * 2):  # less than a row, some rows, one image and two
        monkeypatch.setattr(filters, "_READ_AT_ONCE", limit)
        assert motion_blur_along(images, 3, 2, angles).equal(whole)


@pytest.mark.parametrize(("name", "severity"), [("gaussian_noise", 1), ("gaussian_noise", 5), ("speckle_noise", 5)])
def test_additive_noise_is_normal(name: str, severity: int) -> None:
    deviation = constants(name, severity, 32)[0]
    grey = torch.full((50, 3, 32, 32), 128, dtype=torch.uint8)
    # At 0.5 the noise is hardly ever clipped; half a level is what cutting takes away.
    noise = Corruption(name, severity)(grey, torch.arange(50)).double().flatten() - 128 + 0.5
    scale = 255 * deviation * (128 / 255 if name == "speckle_noise" else 1)
    assert noise.mean() == pytest.approx(0, abs=4 * scale / math.sqrt(len(noise)))
    assert noise.std() == pytest.approx(math.hypot(scale, math.sqrt(1 / 12)), rel=0.01)
    uniforms = stats.norm.cdf(
        noise.numpy()[::7] + np.random.default_rng(0).uniform(-0.5, 0.5, len(noise[::7])), 0, scale
    )
    assert stats.kstest(uniforms, "uniform").pvalue > 1e-3


def test_speckle_noise_leaves_black_alone() -> None:
    black = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    assert Corruption("speckle_noise", 5)(black, torch.arange(2)).equal(black)


@pytest.mark.parametrize("photons", [3, 50, 500])
def test_poisson_table_has_the_distribution(photons: int) -> None:
    share, other = (table.view(256, photons + 1).double() for table in poisson_table(photons))
    mass = share.clone()
    mass.scatter_add_(1, other.long(), 1 - share)
    mass /= photons + 1
    counts, rates = np.arange(photons), photons * np.arange(256)[:, None] / 255
    np.testing.assert_allclose(mass[:, :-1].numpy(), stats.poisson.pmf(counts, rates), atol=1e-8)
    np.testing.assert_allclose(mass[:, -1].numpy(), stats.poisson.sf(photons - 1, rates)[:, 0], atol=1e-8)


@pytest.mark.parametrize(("level", "severity", "side"), [(20, 5, 32), (120, 3, 32), (200, 1, 32), (100, 5, 224)])
def test_shot_noise_is_poisson(level: int, severity: int, side: int) -> None:
    photons = int(constants("shot_noise", severity, side)[0])
    count = 60 if side == 32 else 2
    flat = torch.full((count, 3, side, side), level, dtype=torch.uint8)
    noisy = Corruption("shot_noise", severity)(flat, torch.arange(count)).flatten()
    rate = level / 255 * photons
    # Several counts may fall on one level, where a level is more than a photon.
    levels = torch.tensor([int(255 * min(k / photons, 1) + 1e-3) for k in range(photons + 1)])
    mass = np.append(stats.poisson.pmf(np.arange(photons), rate), stats.poisson.sf(photons - 1, rate))
    expected = np.bincount(levels.numpy(), mass, minlength=256) * noisy.numel()
    observed = torch.bincount(noisy, minlength=256).numpy()
    assert observed[expected == 0].sum() == 0
    often = expected >= 10
    rare = (expected > 0) & ~often
    assert abs(observed[rare].sum() - expected[rare].sum()) <= 4 * math.sqrt(expected[rare].sum())
    scale = observed[often].sum() / expected[often].sum()
    assert stats.chisquare(observed[often], scale * expected[often]).pvalue > 1e-3


@pytest.mark.parametrize("severity", [1, 5])
def test_impulse_noise_is_salt_and_pepper_by_value(severity: int) -> None:
    share = constants("impulse_noise", severity, 32)[0]
    grey = torch.full((100, 3, 32, 32), 77, dtype=torch.uint8)
    noisy = Corruption("impulse_noise", severity)(grey, torch.arange(100))
    assert set(noisy.unique().tolist()) == {0, 77, 255}
    hit = noisy != 77
    for value in (0, 255):
        assert stats.binomtest(int((noisy == value).sum()), noisy.numel(), share / 2).pvalue > 1e-3
    # Channels are hit on their own: all three of a pixel hardly ever.
    assert stats.binomtest(int(hit.all(1).sum()), hit[:, 0].numel(), share**3).pvalue > 1e-3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 32, 32), (3, 48, 40)])
def test_a_sample_has_its_own_draws_whatever_the_batch(name: str, shape: tuple[int, int, int]) -> None:
    channels, height, width = shape
    images = to_tensor(natural_images(6, height, width))[:, :channels].contiguous()
    index = torch.tensor([3, 0, 7, 11, 2, 40])
    corruption = Corruption(name, 4, seed=1)
    whole = corruption(images, index)
    assert whole.shape == images.shape
    assert whole.is_contiguous()
    order = torch.tensor([4, 1, 5])
    parts = torch.cat([corruption(images[rows], index[rows]) for rows in order.split(2)])
    assert parts.equal(whole[order])
    assert corruption(images.contiguous(memory_format=torch.channels_last), index).equal(whole)
    assert corruption(images[:0], index[:0]).shape == (0, *shape)
    assert not whole.equal(images)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("defocus_blur", "zoom_blur", "gaussian_blur")])
def test_index_seed_and_severity_change_the_draws(name: str) -> None:
    image = to_tensor(natural_images(1, 32, 32))
    first = Corruption(name, 3, seed=0)(image, torch.tensor([5]))
    assert first.equal(Corruption(name, 3, seed=0)(image, torch.tensor([5])))
    strength = constants(name, 3, 32)  # at every severity, so that nothing but the draws differs
    for seed, severity, index in ((0, 3, 6), (1, 3, 5), (0, 1, 5), (0, 5, 5)):
        assert not first.equal(Corruption(name, severity, seed, strength=strength)(image, torch.tensor([index])))
    assert first.equal(Corruption(name, 3, seed=0, strength=strength)(image, torch.tensor([5])))


def test_draws_of_calls_purposes_seeds_and_samples_are_independent() -> None:
    rows = []
    for seed, purpose in ((0, "a 1"), (1, "a 1"), (0, "a 2")):
        draws = Draws(seed, purpose, torch.tensor([0, 1]), CPU)
        rows += [draws.normal(4000), draws.normal(4000)]
    correlation = torch.corrcoef(torch.cat(rows)).fill_diagonal_(0)
    assert correlation.abs().max() < 5 / math.sqrt(4000)


def test_every_bit_of_the_seed_and_of_the_purpose_counts() -> None:
    for seed in (2**63 + 1, 2**64 - 1):
        ours, other = (Draws(number, "a", torch.tensor([9]), CPU).uniform(8) for number in (seed, seed - 1))
        assert not ours.equal(other)
        words = np.frombuffer(hashlib.sha256(b"a").digest()[:16], "<u8").astype(object)
        counter, key = int(words[0]) << 128 | int(words[1]) << 192, 9 << 64 | seed
        philox = np.random.Generator(np.random.Philox(counter=counter, key=key))
        np.testing.assert_array_equal(ours[0].numpy(), philox.random(8, dtype=np.float32))


def test_seeds_and_indices_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="seed"):
        Corruption("fog", seed=2**64)
    with pytest.raises(ValueError, match="seed"):
        Corruption("fog", seed=-1)
    images = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    with pytest.raises(ValueError, match="the index of a sample must not be negative: -3"):
        Corruption("gaussian_noise")(images, torch.tensor([4, -3]))


@pytest.mark.parametrize("name", [*CORRUPTIONS, *EXTRA])
@pytest.mark.parametrize("channels", [1, 3])
def test_no_images_are_no_images_still(name: str, channels: int) -> None:
    images = torch.zeros(2, channels, 32, 32, dtype=torch.uint8)
    for severity in (1, 5):
        none = Corruption(name, severity)(images[:0], torch.arange(0))
        assert none.shape == (0, channels, 32, 32)
        assert none.dtype == torch.uint8


@pytest.mark.parametrize("name", [*CORRUPTIONS, *EXTRA])
def test_a_strength_that_makes_no_sense_is_refused(name: str) -> None:
    number = len(constants(name, 1, 32))
    for wrong in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"strength|{name} takes"):
            Corruption(name, strength=(wrong,) * number)
    with pytest.raises(ValueError, match=f"{name} takes"):
        Corruption(name, strength=(1.0,) * (number + 1))
    published = [constants(name, severity, side) for severity in SEVERITIES for side in (SMALL, LARGE)]
    for pixels in (8, 32):
        for least_or_most in (lambda column: min(column) / 10, lambda column: max(column) * 10):
            extreme = Corruption(name, strength=tuple(map(least_or_most, zip(*published, strict=True))))
            try:
                assert extreme(torch.zeros(1, 1, pixels, pixels, dtype=torch.uint8), torch.arange(1)).shape[0] == 1
            except ValueError as error:
                assert f"cannot have {name} of the strength" in str(error)  # noqa: PT017


def test_a_name_that_is_nearly_right_is_suggested() -> None:
    with pytest.raises(ValueError, match=r"unknown corruption: 'motionblur'; did you mean motion_blur"):
        Corruption("motionblur")


def test_draws_are_uniform_and_normal() -> None:
    draws = Draws(0, "test", torch.arange(4), CPU)
    assert stats.kstest(draws.uniform(5000).flatten().numpy(), "uniform").pvalue > 1e-3
    assert stats.kstest(draws.normal(50, 100).flatten().numpy(), "norm").pvalue > 1e-3
