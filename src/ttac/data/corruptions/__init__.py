"""The corruptions of CIFAR-C and ImageNet-C, batched on tensors: the fifteen standard ones and the four extra."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ttac.common.files import text_hash
from ttac.common.lookup import pick
from ttac.common.options import Checked, setting
from ttac.data.corruptions import blur, digital, noise, spatter, weather
from ttac.data.corruptions.constants import NAMES, SEVERITIES, check_strength, constants, table_side
from ttac.data.corruptions.draws import SEEDS, Draws
from ttac.data.corruptions.filters import cut_to_bytes
from ttac.data.corruptions.frost import FrostPhotographs
from ttac.data.labelled import LabelledImages

CORRUPTIONS, EXTRA = NAMES[:15], NAMES[15:]
SMALLEST_SIDE = 8
_VALUES_AT_ONCE = 2**21  # bounds the memory of large batches: 14 images of 224 x 224

# images [N, C, H, W] in [0, 1] on 8-bit levels, constants of the severity, draws -> the same shape; `Corruption` clips
Apply = Callable[[Tensor, tuple[float, ...], Draws], Tensor]
_MODULES = (noise, blur, weather, digital, spatter)
_APPLY: dict[str, Apply] = {
    name: getattr(module, name) for name in NAMES for module in _MODULES if hasattr(module, name)
}


def corruption_names(words: Sequence[str]) -> tuple[str, ...]:
    """Take names and sets of names (standard, extra, all), each name once.

    >>> corruption_names(["fog", "fog"]), len(corruption_names(["fog", "standard"])), len(corruption_names(["all"]))
    (('fog',), 15, 19)
    >>> corruption_names(["extra"])
    ('speckle_noise', 'gaussian_blur', 'spatter', 'saturate')
    """
    sets = {"standard": CORRUPTIONS, "extra": EXTRA, "all": NAMES}
    return tuple(dict.fromkeys(name for word in words for name in sets.get(word, (word,))))


@dataclass(frozen=True)
class Corruption(Checked):
    """One corruption at one severity; what it does to a sample depends on the seed and the sample's index alone.

    >>> noisy = Corruption("gaussian_noise", 5)
    >>> noisy(torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.arange(2)).shape
    torch.Size([2, 3, 32, 32])
    """

    name: str
    severity: int = setting(5, "as published", least=SEVERITIES[0], most=SEVERITIES[-1])
    seed: int = setting(0, "of everything random", least=0, below=SEEDS)
    photographs: FrostPhotographs | None = setting(None, "for frost; None: a procedural texture")
    strength: tuple[float, ...] | None = setting(None, "constants of one's own, in place of the severity's")

    def check(self) -> None:
        """Refuse what there is not."""
        pick(self.name, _APPLY, "corruption")
        if self.strength is not None:
            check_strength(self.name, self.strength)

    def __call__(self, images: Tensor, index: Tensor) -> Tensor:
        """Corrupt uint8 images `[N, C, H, W]`, C 1 or 3, whose places in their data set are `index [N]`."""
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
            raise ValueError(
                f"images are {images.dtype} of shape {tuple(images.shape)}; expected uint8 [N, 1 or 3, H, W]: "
                "(255 * images).round().byte() makes them of images in [0, 1]"
            )
        if index.shape != (len(images),):
            raise ValueError(f"index has shape {tuple(index.shape)}; expected one for each of {len(images)} images")
        side = min(images.shape[2:])
        if side < SMALLEST_SIDE:
            raise ValueError(f"images of {side} pixels are too small to corrupt; {SMALLEST_SIDE} is the least")
        chunk = max(1, _VALUES_AT_ONCE // images[0].numel()) if len(images) else 1
        parts = zip(images.split(chunk), index.split(chunk), strict=True)
        return torch.cat([self._corrupted(part, rows, side) for part, rows in parts])

    def _corrupted(self, images: Tensor, index: Tensor, side: int) -> Tensor:
        apply = partial(weather.frost, photographs=self.photographs) if self.name == "frost" else _APPLY[self.name]
        draws = Draws(self.seed, f"{self.name} {self.severity}", index, images.device)
        pixels = images.float().div_(255)
        if self.strength is None:
            changed = apply(pixels, constants(self.name, self.severity, side), draws)
        else:
            try:
                changed = apply(pixels, self.strength, draws)
                if not changed.isfinite().all():
                    raise ValueError("pixels come out that are not numbers")
            except (ArithmeticError, RuntimeError, ValueError) as error:
                unfit = f"images of {side} pixels cannot have {self.name} of the strength {self.strength}"
                raise ValueError(f"{unfit}: {error}") from error
        return cut_to_bytes(changed)  # as the published arrays are cut

    def notes(self, side: int) -> dict[str, Any]:
        """Say for a record what was done to images of the shorter side `side`."""
        notes: dict[str, Any] = {"corruption": self.name, "severity": self.severity, "seed": self.seed}
        if self.strength is None:
            notes["constants"] = table_side(side)
        else:
            notes["strength"] = list(self.strength)
        if self.name == "frost":
            notes["frost"] = "procedural texture" if self.photographs is None else self.photographs.fingerprint
        return notes

    def of(self, data: LabelledImages) -> LabelledImages:
        """Give the data set with its images corrupted as they are read."""
        return dataclasses.replace(
            data,
            read=lambda rows: self(data.read(rows), rows),
            fingerprint=text_hash([data.fingerprint, repr(sorted(self.notes(min(data.size)).items()))]),
        )
