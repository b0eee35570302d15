"""The four kinds of weather and the six digital corruptions, an image at a time with NumPy, SciPy and Pillow.

Each takes an image uint8 [H, W, 3], the constants of a severity and a generator, and gives values in [0, 255]. Those
that end in `_by` take the random numbers themselves.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
from matplotlib.colors import hsv_to_rgb, rgb_to_hsv
from numpy.typing import NDArray
from PIL import Image as Pillow
from scipy import ndimage

from references.noise_and_blur import clipped_zoom, motion_blur_at
from ttac.data.corruptions.crystals import frost_textures

Constants = tuple[float, ...]
Image = NDArray[np.uint8]
Result = NDArray[np.floating] | NDArray[np.uint8]
Floats = NDArray[np.floating]

LUMA = np.array([0.299, 0.587, 0.114])


def brightness(image: Image, constants: Constants, rng: np.random.Generator) -> Result:
    hsv = rgb_to_hsv(image / 255)
    hsv[..., 2] = np.clip(hsv[..., 2] + constants[0], 0, 1)
    return 255 * hsv_to_rgb(hsv)


def saturate(image: Image, constants: Constants, rng: np.random.Generator) -> Result:
    hsv = rgb_to_hsv(image / 255)
    hsv[..., 1] = np.clip(hsv[..., 1] * constants[0] + constants[1], 0, 1)
    return 255 * hsv_to_rgb(hsv)


def contrast(image: Image, constants: Constants, rng: np.random.Generator) -> Result:
    mean = image.mean((0, 1))
    return np.clip(mean + constants[0] * (image - mean), 0, 255)


def pixelate(image: Image, constants: Constants, rng: np.random.Generator) -> Result:
    height, width = image.shape[:2]
    smaller = int(width * constants[0]), int(height * constants[0])
    box = Pillow.Resampling.BOX
    return np.asarray(Pillow.fromarray(image).resize(smaller, box).resize((width, height), box))


def jpeg_compression(image: Image, constants: Constants, rng: np.random.Generator) -> Result:
    file = io.BytesIO()
    Pillow.fromarray(image).save(file, "JPEG", quality=int(constants[0]))
    return np.asarray(Pillow.open(file))


def elastic_transform(image: Image, constants: Constants, rng: np.random.Generator) -> Result:
    return elastic_by(image, constants, rng.uniform(-1, 1, (3, 2)), rng.uniform(-1, 1, (2, *image.shape[:2])))


def elastic_by(image: Image, constants: Constants, moves: Floats, fields: Floats) -> Result:
    """Move points by `moves [3, 2]`, then pixels by `fields [2, H, W]` once smoothed: (x, y), both in [-1, 1]."""
    strength, sigma, largest = constants
    height, width = image.shape[:2]
    centre, reach = np.array([width // 2, height // 2]), min(height, width) // 3
    before = centre + reach * np.array([[1, 1], [1, -1], [-1, -1]])
    after = before + largest * moves
    # [x y 1] of where the points are now, to where they come from
    x_from, y_from = np.linalg.solve(np.column_stack([after, np.ones(3)]), before).T
    matrix = np.array([[y_from[1], y_from[0]], [x_from[1], x_from[0]]])
    dx, dy = (strength * ndimage.gaussian_filter(field, sigma, mode="reflect", truncate=3) for field in fields)
    rows, columns = np.mgrid[:height, :width]
    channels = []
    for channel in np.moveaxis(image.astype(float), -1, 0):
        # "mirror" does not repeat the edge, "reflect" does.
        moved = ndimage.affine_transform(channel, matrix, [y_from[2], x_from[2]], order=1, mode="mirror")
        channels.append(ndimage.map_coordinates(moved, [rows + dy, columns + dx], order=1, mode="reflect"))
    return np.stack(channels, -1)


def fog(image: Image, constants: Constants, rng: np.random.Generator) -> Result:
    side = 2 ** int(np.ceil(np.log2(max(image.shape[:2]))))
    return fog_by(image, constants, rng.uniform(-1, 1, (side, side)))


def fog_by(image: Image, constants: Constants, noise: Floats) -> Result:
    strength, decay = constants
    height, width = image.shape[:2]
    clear, brightest = image / 255, image.max() / 255
    foggy = clear + strength * plasma(noise, decay)[:height, :width, None]
    return 255 * np.clip(foggy * brightest / (brightest + strength), 0, 1)


def plasma(noise: Floats, decay: float) -> Floats:
    """Each new point of a finer grid is the mean of the four around it plus noise: first along diagonals, then axes."""
    side = len(noise)
    heights = np.zeros((side, side))
    step, wibble = side, 100.0
    while step > 1:
        half = step // 2
        diagonal, straight = [(-1, -1), (-1, 1), (1, -1), (1, 1)], [(-1, 0), (1, 0), (0, -1), (0, 1)]
        for top, left, around in ((half, half, diagonal), (0, half, straight), (half, 0, straight)):
            y, x = np.mgrid[top:side:step, left:side:step]
            near = sum(heights[(y + half * down) % side, (x + half * across) % side] for down, across in around)
            heights[y, x] = near / 4 + wibble * wibble * noise[y, x]
        step, wibble = half, wibble / decay
    heights -= heights.min()
    return heights / heights.max()


def snow(image: Image, constants: Constants, rng: np.random.Generator) -> Result:
    return snow_by(image, constants, rng.normal(size=image.shape[:2]), rng.uniform(-135, -45))


def snow_by(image: Image, constants: Constants, noise: Floats, angle: float) -> Result:
    mean, deviation, zoom, threshold, radius, sigma, kept = constants
    flakes = clipped_zoom((mean + deviation * noise)[..., None], max(zoom, 1))
    flakes = np.where(flakes < threshold, 0, np.clip(flakes, 0, 1))
    flakes = motion_blur_at((255 * flakes).astype(np.uint8), (radius, sigma), angle)
    white = np.maximum(image, 1.5 * (image @ LUMA)[..., None] + 0.5 * 255)
    return np.clip(kept * image + (1 - kept) * white + flakes + np.rot90(flakes, 2), 0, 255)


def frost(image: Image, constants: Constants, rng: np.random.Generator) -> Result:
    """Take every fifth pixel of a texture at 32 x 32, and all of them at 224 x 224; no other sizes."""
    side = len(image)
    texture = frost_textures()[rng.integers(5)].numpy().transpose(1, 2, 0)
    if side == 32:
        texture = texture[2::5, 2::5]
    top, left = rng.integers(0, len(texture) - side, 2)
    return np.clip(constants[0] * image + constants[1] * texture[top : top + side, left : left + side], 0, 255)


def spatter(image: Image, constants: Constants, rng: np.random.Generator) -> Result:
    return spatter_by(image, constants, rng.normal(size=image.shape[:2]))


def spatter_by(image: Image, constants: Constants, noise: Floats) -> Result:
    mean, deviation, sigma, threshold, strength, mud = constants
    liquid = ndimage.gaussian_filter(mean + deviation * noise, sigma, mode="nearest")
    if mud:
        cover = ndimage.gaussian_filter((liquid > threshold).astype(float), strength, mode="nearest")[..., None]
        cover[cover < 0.8] = 0
        return (1 - cover) * image + cover * np.array([63, 42, 20])
    levels = np.where(liquid < threshold, 0, 255 * liquid).astype(int) % 256
    away = np.minimum(distances(canny(levels)), 20)
    shine = levels * relief(away)
    shine = strength * shine / max(shine.max(), 1)
    return np.clip(image + shine[..., None] * np.array([175, 238, 238]), 0, 255)


def canny(levels: NDArray[np.integer]) -> NDArray[np.bool_]:
    slope = np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]])
    dx, dy = (ndimage.correlate(levels, kernel, mode="nearest") for kernel in (slope, slope.T))
    gradient = np.abs(dx) + np.abs(dy)
    padded = np.pad(gradient, 1)
    height, width = levels.shape

    def beside(down: int, across: int) -> NDArray[np.integer]:
        return padded[1 + down : 1 + down + height, 1 + across : 1 + across + width]

    steepness = np.degrees(np.arctan2(np.abs(dy), np.abs(dx)))
    flat, steep = steepness < 22.5, steepness > 67.5
    # Of two equal neighbours along an axis the first is kept, of two along a diagonal none.
    largest = np.where(flat, (gradient > beside(0, -1)) & (gradient >= beside(0, 1)), False)
    largest |= steep & (gradient > beside(-1, 0)) & (gradient >= beside(1, 0))
    same = np.sign(dx) == np.sign(dy)
    between = ~flat & ~steep
    largest |= between & same & (gradient > beside(-1, -1)) & (gradient > beside(1, 1))
    largest |= between & ~same & (gradient > beside(-1, 1)) & (gradient > beside(1, -1))
    parts, _ = ndimage.label(largest & (gradient > 50), np.ones((3, 3)))
    return np.isin(parts, np.unique(parts[largest & (gradient > 150)])) & (parts > 0)


def distances(marked: NDArray[np.bool_]) -> Floats:
    return ndimage.distance_transform_edt(~marked) if marked.any() else np.full(marked.shape, np.inf)


def relief(heights: Floats) -> Floats:
    levels = equalised((ndimage.uniform_filter(heights, 3, mode="mirror") + 1e-6).astype(int))
    emboss = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]])
    lit = np.clip(ndimage.correlate(levels, emboss, mode="mirror"), 0, 255)
    return np.round(ndimage.uniform_filter(lit.astype(float), 3, mode="mirror"))


def equalised(levels: NDArray[np.integer]) -> NDArray[np.integer]:
    values, counts = np.unique(levels, return_counts=True)
    if len(values) == 1:
        return levels
    above_lowest = np.cumsum(counts) - counts[0]
    table = np.zeros(256, int)
    table[values] = np.round(above_lowest * np.float32(255 / (levels.size - counts[0])))
    return table[levels]


REFERENCES: dict[str, Callable[[Image, Constants, np.random.Generator], Result]] = {
    function.__name__: function
    for function in (
        snow,
        frost,
        fog,
        brightness,
        contrast,
        elastic_transform,
        pixelate,
        jpeg_compression,
        spatter,
        saturate,
    )
}
