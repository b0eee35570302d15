"""Random crops of pictures of frost: the published photographs, or textures that are like them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from ttac.common.files import text_hash
from ttac.data.corruptions.constants import LARGE, SMALL, table_side
from ttac.data.corruptions.crystals import frost_textures
from ttac.data.corruptions.draws import Draws
from ttac.data.folder import read_levels

# There is a sixth photograph, which the authors' generators never draw.
PHOTOGRAPHS = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")
SMALL_SCALE = 0.2  # of the photographs for images of 32 pixels; those of 224 take them as they are


@dataclass(frozen=True)
class FrostPhotographs:
    """The photographs that the frost of CIFAR-C and ImageNet-C is cut from, uint8 `[3, H, W]` each."""

    fingerprint: str
    pictures: tuple[Tensor, ...] = field(compare=False, repr=False)

    @classmethod
    def read(cls, folder: Path | str) -> FrostPhotographs:
        """Read the five photographs by their published names."""
        paths = [Path(folder) / name for name in PHOTOGRAPHS]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise FileNotFoundError(
                f"{folder} lacks {', '.join(missing)}: give the folder of the authors' photographs of frost, or none "
                "for a texture instead"
            )
        pictures = tuple(read_levels(path, None, 3) for path in paths)
        return cls(text_hash([hashlib.sha256(picture.numpy().tobytes()).hexdigest() for picture in pictures]), pictures)


def frost_crops(images: Tensor, draws: Draws, photographs: FrostPhotographs | None) -> Tensor:
    """Cut a crop for each of `[N, 3, H, W]` from a random place of a random picture, in [0, 1]."""
    height, width = images.shape[2:]
    pictures = _scaled(photographs, height, width)
    crops = torch.empty(images.shape, dtype=torch.uint8)
    for crop, (chosen, down, across) in zip(crops, draws.uniform(3).tolist(), strict=True):
        picture = pictures[int(chosen * len(pictures))]
        top, left = int(down * (picture.shape[1] - height)), int(across * (picture.shape[2] - width))
        crop.copy_(picture[:, top : top + height, left : left + width])
    return crops.to(images.device).float() / 255


@lru_cache(maxsize=4)  # folders of images of several sizes take turns
def _scaled(photographs: FrostPhotographs | None, height: int, width: int) -> tuple[Tensor, ...]:
    """Scale the pictures in proportion to the images, and so that each covers one."""
    pictures = frost_textures() if photographs is None else photographs.pictures
    side = min(height, width)
    published = SMALL_SCALE * side / SMALL if table_side(side) == SMALL else side / LARGE
    result = []
    for picture in pictures:
        scale = max(published, (height + 0.5) / picture.shape[1], (width + 0.5) / picture.shape[2])
        # Pixels are read at single points, not averaged, as the authors' code did it.
        result.append(F.interpolate(picture[None].float(), scale_factor=scale, mode="bilinear")[0].round_().byte())
    return tuple(result)
