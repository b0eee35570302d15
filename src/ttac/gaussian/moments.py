"""One Gaussian of a stream of vectors without any forgetting, exact over millions of them."""

from __future__ import annotations

import torch
from torch import Tensor

from ttac.gaussian.axis_aligned import Diagonal
from ttac.gaussian.covariance import Covariance
from ttac.gaussian.families import Gaussians
from ttac.gaussian.full import Full


class Moments:
    """Mean and covariance, full or diagonal, of vectors `[n, C]` that come in portions.

    Each portion is centred by its own mean and merged in float64 (Chan et al., 1983), so that neither a mean far from
    zero nor the number of vectors costs precision.

    >>> moments = Moments(1, diagonal=False)
    >>> for portion in torch.tensor([[1.0], [3.0], [5.0]]).split(2):
    ...     moments.add(portion)
    >>> found = moments.gaussian(torch.float32)
    >>> found.mean, found.covariance.dense()
    (tensor([[3.]]), tensor([[[2.6667]]]))
    """

    def __init__(self, dim: int, *, diagonal: bool) -> None:
        self.count = 0
        self._diagonal = diagonal
        self._mean = torch.zeros(dim, dtype=torch.float64)
        self._scatter = torch.zeros((dim,) if diagonal else (dim, dim), dtype=torch.float64)

    def add(self, vectors: Tensor) -> None:
        """Take vectors `[n, C]`, in float32 or float64."""
        count = len(vectors)
        if not count:
            return
        mean = vectors.mean(0)
        centred = vectors - mean
        scatter = centred.square().sum(0) if self._diagonal else centred.mT @ centred
        total = self.count + count
        step = mean.cpu().double() - self._mean
        between = step.square() if self._diagonal else step[:, None] * step
        self._scatter += scatter.cpu().double() + between * (self.count * count / total)
        self._mean += step * (count / total)
        self.count = total

    def gaussian(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Gaussians:
        """Give the one Gaussian of all vectors so far, of which there must be some."""
        spread = (self._scatter / self.count).to(device, dtype)[None]
        covariance: Covariance = Diagonal(spread) if self._diagonal else Full(spread)
        return Gaussians(self._mean.to(device, dtype)[None], covariance)
