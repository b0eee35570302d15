"""Fractal clouds."""

from __future__ import annotations

import torch
from torch import Tensor


def plasma(uniform: Tensor, decay: float) -> Tensor:
    """Make fractals in [0, 1] on a torus of side 2^k by the diamond-square rule: `[N, S, S] -> [N, S, S]`.

    A new point is the mean of its four neighbours plus w² u, u in [-1, 1] by the number in its place; w starts with 100
    and is divided by `decay` when the grid has become twice as fine. The first corner is 0.

    >>> plasma(torch.tensor([[[0.5, 0.5], [0.5, 1.0]]]), 2.0)[0]
    tensor([[0.0000, 0.5000],
            [0.5000, 1.0000]])
    """
    side = uniform.shape[-1]
    corners = torch.zeros_like(uniform[:, :1, :1])
    wibble, step = 100.0, side
    while step > 1:
        new = wibble**2 * (2 * uniform[:, :: step // 2, :: step // 2] - 1)
        finer = torch.empty_like(new)
        finer[:, ::2, ::2] = corners
        across = corners + corners.roll(-1, 2)
        centres = (across + across.roll(-1, 1)) / 4 + new[:, 1::2, 1::2]
        finer[:, 1::2, 1::2] = centres
        finer[:, ::2, 1::2] = (across + centres + centres.roll(1, 1)) / 4 + new[:, ::2, 1::2]
        finer[:, 1::2, ::2] = (corners + corners.roll(-1, 1) + centres + centres.roll(1, 2)) / 4 + new[:, 1::2, ::2]
        corners, wibble, step = finer, wibble / decay, step // 2
    corners = corners - corners.amin((1, 2), keepdim=True)
    return corners / corners.amax((1, 2), keepdim=True)
