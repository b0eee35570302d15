"""scikit-learn's handwritten digits at 32 x 32: real images that ship inside its wheel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ttac.data.sets.specs import get_spec

LEVELS = 16  # of ink in a block, beside none


@dataclass(frozen=True, eq=False)
class Digits:
    """A split into source and target: images `[N, 1, 32, 32]` in [0, 1], labels `[N]`."""

    source_images: Tensor
    source_labels: Tensor
    target_images: Tensor
    target_labels: Tensor


def load_digits(seed: int = 0) -> Digits:
    """Load the 1797 digits, enlarged from 8 x 8, in a random order of which the last 1000 are the target.

    >>> load_digits().target_images.shape
    torch.Size([1000, 1, 32, 32])
    """
    try:
        from sklearn.datasets import load_digits as read
    except ImportError as error:
        raise ImportError("the digits come with scikit-learn: pip install 'ttac[demo]'") from error
    raw, spec = read(), get_spec("digits")
    images = enlarged(torch.from_numpy(raw.images).float())
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    images, labels = images[order], torch.from_numpy(raw.target).long()[order]
    cut = spec.counts["train"]
    return Digits(images[:cut], labels[:cut], images[cut:], labels[cut:])


def enlarged(levels: Tensor) -> Tensor:
    """Enlarge the ink of blocks, `[N, 8, 8]` in 0 .. 16, to images `[N, 1, 32, 32]` in [0, 1].

    >>> enlarged(torch.full((2, 8, 8), 16.0)).unique()
    tensor([1.])
    """
    return F.interpolate(levels[:, None] / LEVELS, size=get_spec("digits").size, mode="bilinear", align_corners=False)
