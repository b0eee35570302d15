"""The published constants of the nineteen corruptions: CIFAR-C's for 32 x 32, ImageNet-C's for 224 x 224.

Other sizes take the table that is nearer (CIFAR-C's where the shorter side is under 85 pixels, the geometric mean of 32
and 224), with every length that is measured in pixels scaled in proportion to the shorter side.
"""

from __future__ import annotations

import math

SMALL, LARGE = 32, 224
SEVERITIES = (1, 2, 3, 4, 5)


class Pixels(float):
    """A length in pixels of the table's own size."""


def _px(*values: float) -> tuple[Pixels, ...]:
    return tuple(Pixels(value) for value in values)


def _ones(values: tuple[float, ...]) -> list[tuple[float, ...]]:
    return [(value,) for value in values]


# Hendrycks & Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and Perturbations", ICLR 2019,
# as the authors' generators of CIFAR-10-C and of ImageNet-C have them, by severity.
_SMALL: dict[str, list[tuple[float, ...]]] = {
    "gaussian_noise": _ones((0.04, 0.06, 0.08, 0.09, 0.10)),  # standard deviation
    "shot_noise": _ones((500, 250, 100, 75, 50)),  # photons of a white pixel
    "impulse_noise": _ones((0.01, 0.02, 0.03, 0.05, 0.07)),  # share of values
    # radius of the disk, sigma that smooths its edge
    "defocus_blur": [_px(0.3, 0.4), _px(0.4, 0.5), _px(0.5, 0.6), _px(1, 0.2), _px(1.5, 0.1)],
    # sigma, largest displacement, times
    "glass_blur": [
        (*_px(s, d), times) for s, d, times in ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2))
    ],
    # radius, sigma
    "motion_blur": [_px(6, 1), _px(6, 1.5), _px(6, 2), _px(8, 2), _px(9, 2.5)],
    # end and step of the zoom factors from 1 on
    "zoom_blur": [(1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)],
    # mean and deviation of flakes, their size, threshold, radius and sigma of their motion, share of the image
    "snow": [
        (0.1, 0.2, *_px(1), 0.6, *_px(8, 3), 0.95),
        (0.1, 0.2, *_px(1), 0.5, *_px(10, 4), 0.9),
        (0.15, 0.3, *_px(1.75), 0.55, *_px(10, 4), 0.9),
        (0.25, 0.3, *_px(2.25), 0.6, *_px(12, 6), 0.85),
        (0.3, 0.3, *_px(1.25), 0.65, *_px(14, 12), 0.8),
    ],
    # weights of image and frost
    "frost": [(1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)],
    # strength, decay of the fractal
    "fog": [(0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)],
    "brightness": _ones((0.05, 0.1, 0.15, 0.2, 0.3)),  # added to the value of HSV
    "contrast": _ones((0.75, 0.5, 0.4, 0.3, 0.15)),  # share of the distance to the mean
    # largest displacement, its smoothness, largest move of the three points of the affine map
    "elastic_transform": [
        _px(*(32 * share for share in shares))
        for shares in ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03))
    ],
    "pixelate": _ones((0.95, 0.9, 0.85, 0.75, 0.65)),  # share of the side
    "jpeg_compression": _ones((80, 65, 58, 50, 40)),  # quality
    "speckle_noise": _ones((0.06, 0.1, 0.12, 0.16, 0.2)),  # standard deviation
    "gaussian_blur": [_px(0.4), _px(0.6), _px(0.7), _px(0.8), _px(1)],  # sigma
    # mean and deviation of the liquid, its smoothness, threshold, strength of water or smoothness of mud, mud or not
    "spatter": [
        (0.62, 0.1, *_px(0.7), 0.7, 0.5, 0),
        (0.65, 0.1, *_px(0.8), 0.7, 0.5, 0),
        (0.65, 0.3, *_px(1), 0.69, 0.5, 0),
        (0.65, 0.1, *_px(0.7), 0.69, *_px(0.6), 1),
        (0.65, 0.1, *_px(0.5), 0.68, *_px(0.6), 1),
    ],
    "saturate": [(0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)],  # factor, summand of HSV's saturation
}
_LARGE: dict[str, list[tuple[float, ...]]] = {
    "gaussian_noise": _ones((0.08, 0.12, 0.18, 0.26, 0.38)),
    "shot_noise": _ones((60, 25, 12, 5, 3)),
    "impulse_noise": _ones((0.03, 0.06, 0.09, 0.17, 0.27)),
    "defocus_blur": [_px(3, 0.1), _px(4, 0.5), _px(6, 0.5), _px(8, 0.5), _px(10, 0.5)],
    "glass_blur": [
        (*_px(s, d), times) for s, d, times in ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2))
    ],
    "motion_blur": [_px(10, 3), _px(15, 5), _px(15, 8), _px(15, 12), _px(20, 15)],
    "zoom_blur": [(1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)],
    "snow": [
        (0.1, 0.3, *_px(3), 0.5, *_px(10, 4), 0.8),
        (0.2, 0.3, *_px(2), 0.5, *_px(12, 4), 0.7),
        (0.55, 0.3, *_px(4), 0.9, *_px(12, 8), 0.7),
        (0.55, 0.3, *_px(4.5), 0.85, *_px(12, 8), 0.65),
        (0.55, 0.3, *_px(2.5), 0.85, *_px(12, 12), 0.55),
    ],
    "frost": [(1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)],
    "fog": [(1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)],
    "brightness": _ones((0.1, 0.2, 0.3, 0.4, 0.5)),
    "contrast": _ones((0.4, 0.3, 0.2, 0.1, 0.05)),
    # The authors wrote 244 where they meant 224; the published images have it.
    "elastic_transform": [
        _px(*(244 * share for share in shares))
        for shares in ((2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02))
    ],
    "pixelate": _ones((0.6, 0.5, 0.4, 0.3, 0.25)),
    "jpeg_compression": _ones((25, 18, 15, 10, 7)),
    "speckle_noise": _ones((0.15, 0.2, 0.35, 0.45, 0.6)),
    "gaussian_blur": [_px(1), _px(2), _px(3), _px(4), _px(6)],
    "spatter": [
        (0.65, 0.3, *_px(4), 0.69, 0.6, 0),
        (0.65, 0.3, *_px(3), 0.68, 0.6, 0),
        (0.65, 0.3, *_px(2), 0.68, 0.5, 0),
        (0.65, 0.3, *_px(1), 0.65, *_px(1.5), 1),
        (0.67, 0.4, *_px(1), 0.65, *_px(1.5), 1),
    ],
    "saturate": [(0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)],
}
NAMES = tuple(_SMALL)


def check_strength(name: str, strength: tuple[float, ...]) -> None:
    """Raise an error unless these are as many numbers as a corruption has constants, each near the published ones.

    >>> check_strength("gaussian_noise", (50.0,))
    Traceback (most recent call last):
    ValueError: gaussian_noise takes a number within ten times of each of 0.04 to 0.38; got (50.0,)
    """
    ranges = [(min(column), max(column)) for column in zip(*_SMALL[name], *_LARGE[name], strict=True)]
    near = len(strength) == len(ranges) and all(
        least / 10 <= value <= 10 * most for value, (least, most) in zip(strength, ranges, strict=True)
    )
    if not near:
        published = ", ".join(f"{float(least):g} to {float(most):g}" for least, most in ranges)
        raise ValueError(f"{name} takes a number within ten times of each of {published}; got {strength}")


def table_side(side: int) -> int:
    """Give the size whose table images of the shorter side `side` take: 32 or 224.

    >>> table_side(64), table_side(96)
    (32, 224)
    """
    return SMALL if side < math.sqrt(SMALL * LARGE) else LARGE


def constants(name: str, severity: int, side: int) -> tuple[float, ...]:
    """Give the constants of a corruption for images of the shorter side `side`.

    >>> constants("gaussian_blur", 5, 32), constants("gaussian_blur", 5, 64), constants("gaussian_blur", 5, 224)
    ((1.0,), (2.0,), (6.0,))
    """
    near = table_side(side)
    row = (_SMALL if near == SMALL else _LARGE)[name][severity - 1]
    return tuple(float(value) * side / near if isinstance(value, Pixels) else float(value) for value in row)
