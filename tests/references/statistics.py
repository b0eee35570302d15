"""What a corruption does to images, in a few numbers for each image."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

_BAND_EDGES = (0.0, 0.06, 0.15, 0.3, 0.75)  # cycles a pixel; the diagonal ends at 0.71


def pixel_statistics(clean: NDArray[np.uint8], corrupted: NDArray[np.uint8]) -> dict[str, NDArray[np.float64]]:
    """Give mean, deviation, PSNR to the clean image, and power by band of frequency: `[N, H, W, C] -> [N]` each."""
    before, after = clean.astype(float), corrupted.astype(float)
    result = {"mean": after.mean((1, 2, 3)), "deviation": after.std((1, 2, 3))}
    error = ((before - after) ** 2).mean((1, 2, 3))
    result["psnr"] = 10 * np.log10(255**2 / (error + 0.1))  # a tenth of a squared level: never infinite
    power = (np.abs(np.fft.fft2(after, axes=(1, 2))) ** 2).mean(-1) / after[0, ..., 0].size
    radius = np.hypot(*np.meshgrid(*(np.fft.fftfreq(side) for side in after.shape[1:3]), indexing="ij"))
    for low, high in itertools.pairwise(_BAND_EDGES):
        band = (radius > low) & (radius <= high)
        result[f"power above {low}"] = np.log10(power[:, band].mean(1) + 0.1)
    return result
