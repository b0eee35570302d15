"""Covariances without a restriction."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from ttac.gaussian.covariance import Covariance, chunks


def cholesky(matrix: Tensor) -> Tensor:
    """Factor `matrix [G, n, n]`; not positive definite gives NaN, and the update refuses that step.

    An exception would end the stream.

    >>> cholesky(torch.tensor([[[4.0]], [[-1.0]]])).flatten()
    tensor([2., nan])
    """
    factor, failed = torch.linalg.cholesky_ex(matrix)
    # On a GPU to write is cheaper than to wait for the answer whether it is needed.
    needed = matrix.is_cuda or bool(failed.any())
    return factor.masked_fill_((failed > 0)[:, None, None], torch.nan) if needed else factor


@dataclass(frozen=True, eq=False)
class Full(Covariance):
    """Unrestricted matrices.

    >>> Full(2 * torch.eye(3)[None]).logdet().exp()
    tensor([8.0000])
    """

    family: ClassVar[str] = "full"
    prepared: ClassVar[str | None] = "precision"
    matrix: Tensor  # [G, D, D]

    @classmethod
    def zeros(cls, count: int, dim: int, rank: int, like: Tensor) -> Full:
        return cls(like.new_zeros(count, dim, dim))

    @cached_property
    def _factor(self) -> Tensor:
        return cholesky(self.matrix)

    @cached_property
    def precision(self) -> Tensor:
        """The inverses `[G, D, D]`: three times the cost of the factors, so only for matrices that stay."""
        inverses = torch.empty_like(self.matrix)
        for part in chunks(len(inverses), self.bytes_each()):
            inverses[part] = torch.cholesky_inverse(cholesky(self.matrix[part]))
        return inverses

    def dense(self) -> Tensor:
        return self.matrix

    def diagonal(self) -> Tensor:
        return self.matrix.diagonal(dim1=1, dim2=2)

    def plus(self, ridge: float) -> Full:
        raised = Full(self.matrix.clone())
        raised.diagonal().add_(ridge)
        return raised

    def blended(self, keep: Tensor, roots: Tensor, ridge: float = 0.0) -> Full:
        result = Full((self.matrix * keep[:, None, None]).baddbmm_(roots.mT, roots))
        result.diagonal().add_(ridge)
        return result

    def apply(self, vectors: Tensor) -> Tensor:
        return vectors @ self.matrix

    def solve(self, vectors: Tensor) -> Tensor:
        if "precision" in self.__dict__:
            return vectors @ self.precision
        # Two triangular solutions, because `cholesky_solve` copies the factor first.
        half = torch.linalg.solve_triangular(self._factor, vectors.mT, upper=False)
        return torch.linalg.solve_triangular(self._factor.mT, half, upper=True).mT

    def trace_solve(self, other: Full) -> Tensor:
        return (self.precision.flatten(1)[:, None] @ other.matrix.flatten(1)[:, :, None]).flatten()

    def logdet(self) -> Tensor:
        return 2 * self._factor.diagonal(dim1=1, dim2=2).log().sum(1)

    def squared_norm(self) -> Tensor:
        return torch.linalg.vector_norm(self.matrix, dim=(1, 2)).square()
