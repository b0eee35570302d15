"""The four kinds of noise and the five of blur, an image at a time with NumPy and SciPy alone.

Each takes an image uint8 [H, W, 3], the constants of a severity and a generator, and gives values in [0, 255].
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

Constants = tuple[float, ...]
Image = NDArray[np.uint8]
Result = NDArray[np.floating] | NDArray[np.uint8]


def gaussian_noise(image: Image, constants: Constants, rng: np.random.Generator) -> Result:
    return 255 * np.clip(image / 255 + rng.normal(0, constants[0], image.shape), 0, 1)


def shot_noise(image: Image, constants: Constants, rng: np.random.Generator) -> Result:
    return 255 * np.clip(rng.poisson(image / 255 * constants[0]) / constants[0], 0, 1)


def impulse_noise(image: Image, constants: Constants, rng: np.random.Generator) -> Result:
    result = image.copy()
    hit = rng.random(image.shape) < constants[0]
    result[hit] = rng.choice([0, 255], hit.sum())
    return result


def speckle_noise(image: Image, constants: Constants, rng: np.random.Generator) -> Result:
    return 255 * np.clip(image / 255 * (1 + rng.normal(0, constants[0], image.shape)), 0, 1)


def gaussian_blur(image: Image, constants: Constants, rng: np.random.Generator) -> Result:
    return _smooth(image, constants[0])


def _smooth(image: Image, sigma: float) -> NDArray[np.float64]:
    return ndimage.gaussian_filter(image.astype(float), (sigma, sigma, 0), mode="nearest", truncate=4)


def defocus_blur(image: Image, constants: Constants, rng: np.random.Generator) -> Result:
    kernel = defocus_kernel(*constants)
    # "mirror" does not repeat the edge.
    return np.stack([ndimage.correlate(image[..., c].astype(float), kernel, mode="mirror") for c in range(3)], -1)


def defocus_kernel(radius: float, sigma: float) -> NDArray[np.float64]:
    reach = 8 if radius <= 8 else math.ceil(radius)
    inside = [[x * x + y * y <= radius**2 for x in range(-reach, reach + 1)] for y in range(-reach, reach + 1)]
    kernel = np.array(inside, float) / np.sum(inside)
    steps = np.arange(-1, 2) if radius <= 8 else np.arange(-2, 3)
    taps = np.exp(-(steps**2) / (2 * sigma**2))
    for axis in (0, 1):
        kernel = ndimage.correlate1d(kernel, taps / taps.sum(), axis, mode="mirror")
    return kernel


def glass_blur(image: Image, constants: Constants, rng: np.random.Generator) -> Result:
    reach, times = max(1, round(constants[1])), int(constants[2])
    inner = (times, image.shape[0] - 2 * reach, image.shape[1] - 2 * reach, 2)
    return glass_blur_by(image, constants[0], reach, rng.integers(-reach, reach, inner))


def glass_blur_by(image: Image, sigma: float, reach: int, displacements: NDArray[np.integer]) -> Result:
    """Displace by (down, across) of `displacements [times, H - 2 reach, W - 2 reach, 2]`."""
    result = (_smooth(image, sigma) + 1e-6).astype(np.uint8)
    height, width = image.shape[:2]
    for round_ in displacements.tolist():
        for y in range(height - reach, reach, -1):
            for x in range(width - reach, reach, -1):
                down, across = round_[y - reach - 1][x - reach - 1]
                result[y, x] = result[y + down, x + across]
    return _smooth(result, sigma)


def motion_blur(image: Image, constants: Constants, rng: np.random.Generator) -> Result:
    return motion_blur_at(image, constants, rng.uniform(-45, 45))


def motion_blur_at(image: Image, constants: Constants, angle: float) -> Result:
    radius, sigma = constants
    taps = 2 * math.ceil(radius) + 1
    height, width = image.shape[:2]
    padded = np.pad(image.astype(float), ((taps, taps), (taps, taps), (0, 0)), mode="edge")
    weights = [math.exp(-(i**2) / (2 * sigma**2)) for i in range(taps)]
    total = np.zeros(image.shape)
    for i, weight in enumerate(weights):
        left = taps + math.ceil(i * math.cos(math.radians(angle)) - 0.5)
        top = taps + math.ceil(i * math.sin(math.radians(angle)) - 0.5)
        total += weight / sum(weights) * padded[top : top + height, left : left + width]
    return np.round(total)


def zoom_blur(image: Image, constants: Constants, rng: np.random.Generator) -> Result:
    end, step = constants
    factors = np.arange(1, end, step)
    return (image + sum(clipped_zoom(image.astype(float), factor) for factor in factors)) / (len(factors) + 1)


def clipped_zoom(image: NDArray[np.float64], factor: float) -> NDArray[np.float64]:
    height, width = image.shape[:2]
    part = _middle(image, math.ceil(height / factor), math.ceil(width / factor))
    return _middle(ndimage.zoom(part, (factor, factor, 1), order=1), height, width)


def _middle(image: NDArray[np.float64], height: int, width: int) -> NDArray[np.float64]:
    top, left = (image.shape[0] - height) // 2, (image.shape[1] - width) // 2
    return image[top : top + height, left : left + width]


REFERENCES: dict[str, Callable[[Image, Constants, np.random.Generator], Result]] = {
    function.__name__: function
    for function in (
        gaussian_noise,
        shot_noise,
        impulse_noise,
        speckle_noise,
        defocus_blur,
        glass_blur,
        motion_blur,
        zoom_blur,
        gaussian_blur,
    )
}
