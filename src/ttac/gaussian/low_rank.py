"""Covariances of few directions and the same noise in all."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ttac.gaussian.covariance import Covariance, positive
from ttac.gaussian.full import cholesky


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose symmetric `matrix [G, n, n]`, values ascending; what is not finite gives NaN, as in `cholesky`.

    >>> eigh(torch.tensor([[[4.0]], [[torch.inf]]]))[0].flatten()
    tensor([4., nan])
    """
    broken = ~matrix.isfinite().flatten(1).all(1)
    values, vectors = torch.linalg.eigh(matrix.masked_fill(broken[:, None, None], 0) if bool(broken.any()) else matrix)
    return values.masked_fill(broken[:, None], torch.nan), vectors


@dataclass(frozen=True, eq=False)
class LowRank(Covariance):
    """Matrices `U U^T + s I` with `s > 0`; all arithmetic stays in r dimensions (Woodbury).

    >>> LowRank(torch.ones(1, 2, 1), torch.ones(1)).dense()
    tensor([[[2., 1.],
             [1., 2.]]])
    """

    family: ClassVar[str] = "low-rank"
    prepared: ClassVar[str | None] = "inner_factor"
    factor: Tensor  # U [G, D, r]
    noise: Tensor  # s [G]

    @classmethod
    def zeros(cls, count: int, dim: int, rank: int, like: Tensor) -> LowRank:
        return cls(like.new_zeros(count, dim, rank), like.new_zeros(count))

    @cached_property
    def inner_factor(self) -> Tensor:
        """The Cholesky factor of `M = s I + U^T U [G, r, r]`, which Woodbury's identity inverts instead of Sigma."""
        gram = self.factor.mT @ self.factor
        gram.diagonal(dim1=1, dim2=2).add_(self.noise[:, None])
        return cholesky(gram)

    def dense(self) -> Tensor:
        return self.factor @ self.factor.mT + torch.diag_embed(self.noise[:, None].expand(self.factor.shape[:2]))

    def diagonal(self) -> Tensor:
        return torch.linalg.vector_norm(self.factor, dim=2).square() + self.noise[:, None]

    def plus(self, ridge: float) -> LowRank:
        return LowRank(self.factor, self.noise + ridge)

    def blended(self, keep: Tensor, roots: Tensor, ridge: float = 0.0) -> LowRank:
        factor = torch.cat([self.factor * keep.sqrt()[:, None, None], roots.mT], 2)
        joined = LowRank(factor, self.noise * keep + ridge)
        dim, width = factor.shape[1:]
        return joined.compacted(dim) if width > dim else joined  # exactly: there are no more than D directions

    def bytes_blended(self, samples: int) -> int:
        dim, width = self.factor.shape[1], self.factor.shape[2] + samples
        side = min(dim, width)  # of the Gram matrix, beside which are its eigenvectors and their workspace
        return self.factor.element_size() * (dim * width + 4 * side * side)

    def compacted(self, rank: int) -> LowRank:
        """Keep the `rank` largest directions; the rest goes into `s`, so the trace is unchanged (probabilistic PCA)."""
        dim, width = self.factor.shape[1:]
        if width <= rank:
            return LowRank(F.pad(self.factor, (0, rank - width)), self.noise)
        # U^T U [r, r] and U U^T [D, D] have the same eigenvalues beside zeros: the smaller is decomposed.
        wide = width > dim
        values, vectors = eigh(self.factor @ self.factor.mT if wide else self.factor.mT @ self.factor)
        values = values.clamp_min(0)
        dropped = max(values.shape[1] - rank, 0)
        rest = values[:, :dropped].sum(1) / max(dim - rank, 1)
        values, vectors = values[:, dropped:], vectors[:, :, dropped:]
        lengths = (values - rest[:, None]).clamp_min(0)  # squared
        if wide:
            factor = vectors * lengths.sqrt()[:, None]
        else:  # the norms of `U v` are the square roots of the eigenvalues
            factor = self.factor @ (vectors * (lengths / values.clamp_min(1e-30)).sqrt()[:, None])
        return LowRank(F.pad(factor, (0, rank - factor.shape[2])), self.noise + rest)

    def store(self, index: Tensor, other: LowRank) -> None:
        super().store(index, other.compacted(self.factor.shape[2]))

    def apply(self, vectors: Tensor) -> Tensor:
        return (vectors @ self.factor) @ self.factor.mT + self.noise[:, None, None] * vectors

    def solve(self, vectors: Tensor) -> Tensor:
        projected = (vectors @ self.factor).mT  # U^T v [G, r, m]
        explained = self.factor @ torch.cholesky_solve(projected, self.inner_factor)
        return (vectors - explained.mT) / positive(self.noise)[:, None, None]

    def trace_solve(self, other: LowRank) -> Tensor:
        dim, rank = self.factor.shape[1:]
        inverse = torch.cholesky_inverse(self.inner_factor)
        # tr(Sigma^-1) = (D - r) / s + tr(M^-1), as the eigenvalues of M are those of Sigma in the span of U.
        trace_inverse = (dim - rank) / self.noise + inverse.diagonal(dim1=1, dim2=2).sum(1)
        cross = self.factor.mT @ other.factor  # [G, r, r']
        explained = (cross * (inverse @ cross)).sum((1, 2))
        total = torch.linalg.vector_norm(other.factor, dim=(1, 2)).square()
        return other.noise * trace_inverse + (total - explained) / self.noise

    def logdet(self) -> Tensor:
        dim, rank = self.factor.shape[1:]
        return (dim - rank) * self.noise.log() + 2 * self.inner_factor.diagonal(dim1=1, dim2=2).log().sum(1)

    def squared_norm(self) -> Tensor:
        gram = self.factor.mT @ self.factor
        trace = gram.diagonal(dim1=1, dim2=2).sum(1)
        return gram.square().sum((1, 2)) + self.noise * (2 * trace + self.factor.shape[1] * self.noise)
