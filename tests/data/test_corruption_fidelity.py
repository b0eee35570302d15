"""All nineteen corruptions do to images what references that were written an image at a time do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from references import REFERENCES
from references.images import cut, natural_images
from references.statistics import pixel_statistics
from ttac.data.corruptions import CORRUPTIONS, EXTRA, Corruption
from ttac.data.corruptions.constants import SEVERITIES, constants

SIDE, COUNT = 32, 48
ROUNDING = 0.01  # levels, decibels or decimal logarithms, which single precision may change in the cutting to levels


@pytest.fixture(scope="module")
def clean() -> NDArray[np.uint8]:
    return natural_images(COUNT, SIDE, SIDE)


def test_every_corruption_has_a_reference() -> None:
    assert set(REFERENCES) == {*CORRUPTIONS, *EXTRA}


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("name", REFERENCES)
def test_statistics_are_those_of_the_reference(name: str, severity: int, clean: NDArray[np.uint8]) -> None:
    ours = Corruption(name, severity)(torch.from_numpy(clean).permute(0, 3, 1, 2).contiguous(), torch.arange(COUNT))
    measured = pixel_statistics(clean, ours.permute(0, 2, 3, 1).numpy())
    first, second = (pixel_statistics(clean, _reference(name, severity, seed, clean)) for seed in (0, 1))
    for what, values in measured.items():
        # Two runs of the reference say how far chance moves the mean over the images; ours may differ by 4 times that.
        error = (first[what] - second[what]).std(ddof=1) / np.sqrt(COUNT)
        expected = (first[what] + second[what]).mean() / 2
        assert values.mean() == pytest.approx(expected, abs=4 * error + ROUNDING), what


def _reference(name: str, severity: int, seed: int, clean: NDArray[np.uint8]) -> NDArray[np.uint8]:
    rng = np.random.default_rng(seed)
    numbers = constants(name, severity, SIDE)
    return cut(np.stack([np.asarray(REFERENCES[name](image, numbers, rng)) for image in clean]))
