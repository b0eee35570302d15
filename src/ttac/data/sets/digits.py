"""scikit-learn's handwritten digits at 32 x 32: real images that ship inside its wheel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ttac.data.sets.specs import get_spec

LEVELS = 16  # of ink in a block, beside none


def load_digits(split: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Load train or test, `[N, 1, 32, 32]` in [0, 1] with labels `[N]`: the last 1000 of a random order are the test.

    >>> load_digits("test")[0].shape
    torch.Size([1000, 1, 32, 32])
    """
    try:
        from sklearn.datasets import load_digits as read
    except ImportError as error:
        raise ImportError("the digits come with scikit-learn: pip install 'ttac[demo]'") from error
    raw, cut = read(), get_spec("digits").counts["train"]
    order = torch.randperm(len(raw.images), generator=torch.Generator().manual_seed(seed))
    rows = order[:cut] if split == "train" else order[cut:]
    return enlarged(torch.from_numpy(raw.images).float())[rows], torch.from_numpy(raw.target).long()[rows]


def enlarged(levels: Tensor) -> Tensor:
    """Enlarge the ink of blocks, `[N, 8, 8]` in 0 .. 16, to images `[N, 1, 32, 32]` in [0, 1].

    >>> enlarged(torch.full((2, 8, 8), 16.0)).unique()
    tensor([1.])
    """
    return F.interpolate(levels[:, None] / LEVELS, size=get_spec("digits").size, mode="bilinear", align_corners=False)
