"""Draw all nineteen corruptions of one picture, at the severity given, with the constants of 224 x 224.

    python benchmarks/corruption_sheet.py --out docs/corruptions.jpg

The picture is "flower" of scikit-learn's samples, which ship with it (CC BY, by Dan Mc).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from jsonargparse import auto_cli
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_sample_image

from ttac.common.files import replacing
from ttac.data.corruptions import CORRUPTIONS, EXTRA, Corruption
from ttac.data.corruptions.constants import LARGE

COLUMNS = 5
TILE, LINE = 150, 18


def main(out: Path, severity: int = 5, seed: int = 0) -> None:
    """Write the sheet.

    Args:
        out: JPEG file.
        severity: 1 to 5.
        seed: of the corruptions.
    """
    photograph = load_sample_image("flower.jpg")
    side = min(photograph.shape[:2])
    left = (photograph.shape[1] - side) // 2
    square = Image.fromarray(photograph[:side, left : left + side]).resize((LARGE, LARGE), Image.Resampling.BICUBIC)
    clean = torch.from_numpy(np.array(square)).permute(2, 0, 1)[None]
    tiles = {"clean": clean}
    for name in (*CORRUPTIONS, *EXTRA):
        tiles[name] = Corruption(name, severity, seed)(clean, torch.zeros(1, dtype=torch.long))
    rows = -(-len(tiles) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * TILE, rows * (TILE + LINE)), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    for place, (name, image) in enumerate(tiles.items()):
        x, y = place % COLUMNS * TILE, place // COLUMNS * (TILE + LINE)
        tile = Image.fromarray(image[0].permute(1, 2, 0).numpy()).resize((TILE, TILE), Image.Resampling.LANCZOS)
        sheet.paste(tile, (x, y + LINE))
        draw.text((x + 4, y + 2), name.replace("_", " "), fill="black", font=font)
    with replacing(out) as draft:
        sheet.save(draft, format="JPEG", quality=88)


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
