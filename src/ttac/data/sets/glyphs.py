"""Digits drawn from fonts: a synthetic source, whose real target are the handwritten digits.

Of those, bitmaps were scaled until each digit filled the height of a square, and the ink of 8 x 8 blocks was counted.
Drawn digits go the same way. Resolution and grey levels are the same, and what is left is how people write.
"""

from __future__ import annotations

from functools import cache
from math import cos, radians, sin
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ttac.common.lookup import pick
from ttac.data.sets.digits import LEVELS, enlarged
from ttac.data.sets.specs import get_spec

# Left out: the zero of DejaVu Sans Mono has a dot that nobody writes, cmmi10 has digits that hang below the line, and
# matplotlib's other fonts have none.
_LIGHT = (
    "DejaVuSans.ttf", "DejaVuSans-Oblique.ttf", "DejaVuSerif.ttf", "DejaVuSerif-Italic.ttf", "STIXGeneral.ttf",
    "STIXGeneralItalic.ttf", "cmr10.ttf", "cmss10.ttf", "cmti10.ttf", "cmtt10.ttf",
)  # fmt: skip
_BOLD = (
    "DejaVuSans-Bold.ttf", "DejaVuSans-BoldOblique.ttf", "DejaVuSerif-Bold.ttf", "DejaVuSerif-BoldItalic.ttf",
    "STIXGeneralBol.ttf", "STIXGeneralBolIta.ttf", "cmb10.ttf",
)  # fmt: skip
# Pixels that an outline grows to each side, at least and at most: a pen is as thick in all its strokes.
PENS = {**dict.fromkeys(_LIGHT, (2, 5)), **dict.fromkeys(_BOLD, (0, 2))}
EM = 80  # pixels; a digit is about 55 high
PAPER = 96  # pixels a side, with room to turn a digit
TURN = radians(10)  # to each side
SHEAR = 0.2  # columns a row, to each side
STRETCH = (0.75, 1.05)  # of the width
HEIGHT = (29, 32)  # pixels of the square
SIDE, BLOCK = 32, 4  # pixels of the square and of a block


def draw_glyphs(split: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw train or test, `[N, 1, 32, 32]` in [0, 1] with labels `[N]`: a font, thickness, slant and place by chance.

    >>> images, labels = draw_glyphs("test")
    >>> images.shape, labels.shape
    (torch.Size([1000, 1, 32, 32]), torch.Size([1000]))
    """
    spec = get_spec("glyphs")
    count = pick(split, spec.counts, "split")
    rng = np.random.default_rng((seed, list(spec.counts).index(split)))
    labels = rng.permutation(np.arange(count) % spec.num_classes)
    folder = font_folder()
    fonts = rng.choice(list(PENS), len(labels))
    ink = np.stack([_blocks(_written(folder, *pair, rng), rng) for pair in zip(fonts, labels, strict=True)])
    levels = torch.from_numpy(ink).float() * (LEVELS / 255)
    return enlarged(levels.round()), torch.from_numpy(labels)


def font_folder() -> Path:
    """Give the folder of matplotlib's fonts."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ImportError("the glyphs are drawn from matplotlib's fonts: pip install 'ttac[report]'") from error
    return Path(mpl.get_data_path()) / "fonts" / "ttf"


def draw_digit(font: Path, digit: int, stroke: int = 0) -> Image.Image:
    """Draw a digit in the middle of a sheet, white on black, its outline moved out by `stroke` pixels.

    >>> draw_digit(font_folder() / "cmr10.ttf", 8).getextrema()
    (0, 255)
    """
    paper = Image.new("L", (PAPER, PAPER))
    ImageDraw.Draw(paper).text(
        (PAPER / 2, PAPER / 2), str(digit), fill=255, font=_font(font), anchor="mm", stroke_width=stroke
    )
    return paper


@cache
def _font(path: Path) -> ImageFont.FreeTypeFont:
    if not path.is_file():
        raise FileNotFoundError(f"no font {path}, which matplotlib comes with: install it again, by pip")
    # The other engine is not part of every Pillow, and places digits its own way.
    return ImageFont.truetype(path, EM, layout_engine=ImageFont.Layout.BASIC)


def _written(folder: Path, font: str, digit: int, rng: np.random.Generator) -> Image.Image:
    """Draw a digit with a pen of some thickness, turned and sheared about the middle of the sheet."""
    paper = draw_digit(folder / font, digit, int(rng.integers(*PENS[font], endpoint=True)))
    turn, shear = rng.uniform(-TURN, TURN), rng.uniform(-SHEAR, SHEAR)
    matrix = np.array([[cos(turn), -sin(turn)], [sin(turn), cos(turn)]]) @ np.array([[1, shear], [0, 1]])
    shift = PAPER / 2 * (1 - matrix.sum(1))
    back = np.column_stack([matrix, shift])  # from a pixel of the new sheet to where it was
    return paper.transform(paper.size, Image.Transform.AFFINE, back.ravel().tolist())


def _blocks(paper: Image.Image, rng: np.random.Generator) -> np.ndarray:
    """Scale the digit on a sheet to the height of the square, and give the ink of its blocks, `[8, 8]` in 0 .. 255."""
    box = paper.getbbox()
    assert box is not None
    left, top, right, bottom = box
    height = int(rng.integers(*HEIGHT, endpoint=True))
    width = min(SIDE, round((right - left) * height / (bottom - top) * rng.uniform(*STRETCH)))
    room = SIDE - width
    # Handwritten digits stand in the middle of the width, or not far from it.
    x, y = rng.integers(room // 3, 2 * room // 3, endpoint=True), rng.integers(SIDE - height, endpoint=True)
    square = Image.new("L", (SIDE, SIDE))
    square.paste(paper.resize((width, height), Image.Resampling.BILINEAR, box), (int(x), int(y)))
    return np.asarray(square.reduce(BLOCK))
