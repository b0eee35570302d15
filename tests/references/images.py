"""Images to corrupt: colour fields that are smooth but for a few edges, and scikit-learn's digits in colour."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from sklearn.datasets import load_digits


def natural_images(count: int, height: int, width: int) -> NDArray[np.uint8]:
    """Make the same images every time, fields and digits in turn: `[N, H, W, 3]`."""
    rng = np.random.default_rng(8)
    digits = load_digits().images / 16
    makers = [lambda: _field(rng, height, width), lambda: _digit(rng, digits, height, width)]
    return np.stack([(255 * makers[n % 2]()).round().astype(np.uint8) for n in range(count)])


def _field(rng: np.random.Generator, height: int, width: int) -> NDArray[np.float64]:
    scale = min(height, width) / 8
    field = ndimage.gaussian_filter(rng.normal(size=(height, width, 3)), (scale, scale, 1))
    y, x = np.mgrid[:height, :width] / min(height, width)
    for _ in range(3):
        angle, place = rng.uniform(0, np.pi), rng.uniform(-0.2, 1)
        beyond = y * np.sin(angle) + x * np.cos(angle) > place
        field = field + beyond[..., None] * rng.normal(0, field.std(), 3)
    grain = ndimage.gaussian_filter(rng.normal(size=(height, width, 1)), (0.7, 0.7, 0))
    field = field / field.std() + 0.2 * grain
    return np.clip(rng.uniform(0.3, 0.6) + 0.2 * field, 0, 1)


def _digit(rng: np.random.Generator, digits: NDArray[np.float64], height: int, width: int) -> NDArray[np.float64]:
    digit = digits[rng.integers(len(digits))]
    digit = np.clip(ndimage.zoom(digit, (height / 8, width / 8), order=1), 0, 1)[..., None]
    ink, paper = rng.random(3), rng.random(3)
    return ink * digit + paper * (1 - digit)


def cut(levels: NDArray[np.generic]) -> NDArray[np.uint8]:
    """Cut fractions off, of levels in 0 ... 255; one that a filter leaves as it was must stay."""
    return (np.clip(levels.astype(float), 0, 255) + 2e-4).astype(np.uint8)
