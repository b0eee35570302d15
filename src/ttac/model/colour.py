"""Colour and grey."""

from __future__ import annotations

from torch import Tensor


def grey(images: Tensor) -> Tensor:
    """ITU-R 601-2 luma of RGB and the channel mean of anything else: `[N, C, H, W] -> [N, 1, H, W]`.

    >>> import torch
    >>> grey(torch.eye(3).view(3, 3, 1, 1)).flatten()
    tensor([0.2990, 0.5870, 0.1140])
    """
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    return 0.299 * images[:, 0:1] + 0.587 * images[:, 1:2] + 0.114 * images[:, 2:3]
