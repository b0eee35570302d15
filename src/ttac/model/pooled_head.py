"""Heads that are a 1 x 1 convolution and an average over positions, taken as the linear layers that they are."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import functional as F


class PooledHead:
    """A 1 x 1 convolution whose output is averaged over positions: a linear layer on averaged features.

    It has what methods use of `nn.Linear`; `weight` shares its memory with the convolution's.

    >>> import torch
    >>> head = PooledHead(nn.Conv2d(8, 3, 1))
    >>> head(torch.rand(2, 8)).shape, head.weight.shape
    (torch.Size([2, 3]), torch.Size([3, 8]))
    """

    def __init__(self, layer: nn.Conv2d) -> None:
        self.layer = layer
        self.in_features, self.out_features = layer.in_channels, layer.out_channels

    @property
    def weight(self) -> Tensor:
        """One row for each class: `[K, D]`."""
        return self.layer.weight[:, :, 0, 0]

    @property
    def bias(self) -> Tensor | None:
        """One number for each class: `[K]`."""
        return self.layer.bias

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of the convolution."""
        return self.layer.parameters()

    def __call__(self, features: Tensor) -> Tensor:
        """Score features: `[N, D] -> [N, K]`."""
        return F.linear(features, self.weight, self.bias)


def head_of(model: nn.Module, name: str) -> nn.Linear | PooledHead:
    """Give the layer that `find_head` found."""
    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Linear | nn.Conv2d)
    return layer if isinstance(layer, nn.Linear) else PooledHead(layer)


def pooled(maps: Tensor) -> Tensor:
    """Average maps over positions: `[N, D, H, W] -> [N, D]`; what is none is left as it is."""
    return maps.mean((2, 3)) if maps.ndim == 4 else maps
