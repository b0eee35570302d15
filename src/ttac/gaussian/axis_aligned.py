"""Covariances whose features are independent of each other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ttac.gaussian.covariance import Covariance, positive


@dataclass(frozen=True, eq=False)
class Diagonal(Covariance):
    """Matrices with nothing beside the diagonal.

    >>> Diagonal(torch.tensor([[1.0, 4.0]])).solve(torch.ones(1, 1, 2))
    tensor([[[1.0000, 0.2500]]])
    """

    family: ClassVar[str] = "diagonal"
    variance: Tensor  # [G, D]

    @classmethod
    def zeros(cls, count: int, dim: int, rank: int, like: Tensor) -> Diagonal:
        return cls(like.new_zeros(count, dim))

    def dense(self) -> Tensor:
        return torch.diag_embed(self.variance)

    def diagonal(self) -> Tensor:
        return self.variance

    def plus(self, ridge: float) -> Diagonal:
        return Diagonal(self.variance + ridge)

    def blended(self, keep: Tensor, roots: Tensor, ridge: float = 0.0) -> Diagonal:
        return Diagonal(self.variance * keep[:, None] + roots.square().sum(1) + ridge)

    def apply(self, vectors: Tensor) -> Tensor:
        return vectors * self.variance[:, None]

    def solve(self, vectors: Tensor) -> Tensor:
        return vectors / positive(self.variance)[:, None]

    def outer(self, direction: Tensor, vectors: Tensor) -> Tensor:
        return vectors * direction.square()[:, None]

    def trace_solve(self, other: Diagonal) -> Tensor:
        return (other.variance / self.variance).sum(1)

    def logdet(self) -> Tensor:
        return self.variance.log().sum(1)

    def squared_norm(self) -> Tensor:
        return self.variance.square().sum(1)


@dataclass(frozen=True, eq=False)
class Isotropic(Covariance):
    """Multiples of the identity; `dim` travels along because one number does not know it.

    >>> Isotropic(torch.tensor([2.0]), torch.tensor(3)).dense()[0].diagonal()
    tensor([2., 2., 2.])
    """

    family: ClassVar[str] = "isotropic"
    noise: Tensor  # s [G]
    dim: Tensor  # D, a scalar tensor so that it is saved with the rest

    @classmethod
    def zeros(cls, count: int, dim: int, rank: int, like: Tensor) -> Isotropic:
        return cls(like.new_zeros(count), torch.tensor(dim))

    def dense(self) -> Tensor:
        return torch.diag_embed(self.diagonal())

    def diagonal(self) -> Tensor:
        return self.noise[:, None].expand(-1, int(self.dim))

    def plus(self, ridge: float) -> Isotropic:
        return replace(self, noise=self.noise + ridge)

    def blended(self, keep: Tensor, roots: Tensor, ridge: float = 0.0) -> Isotropic:
        return replace(self, noise=self.noise * keep + roots.square().sum((1, 2)) / roots.shape[2] + ridge)

    def apply(self, vectors: Tensor) -> Tensor:
        return vectors * self.noise[:, None, None]

    def solve(self, vectors: Tensor) -> Tensor:
        return vectors / positive(self.noise)[:, None, None]

    def outer(self, direction: Tensor, vectors: Tensor) -> Tensor:
        return vectors * direction.square().mean(1)[:, None, None]

    def trace_solve(self, other: Isotropic) -> Tensor:
        return self.dim.to(self.noise) * other.noise / self.noise

    def logdet(self) -> Tensor:
        return self.dim.to(self.noise) * self.noise.log()

    def squared_norm(self) -> Tensor:
        return self.dim.to(self.noise) * self.noise.square()
