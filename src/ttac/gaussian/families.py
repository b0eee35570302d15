"""Families of covariances behind one interface: G matrices of D x D, stored as their structure allows.

| family | stores | bytes (float32) |
| --- | --- | --- |
| full | `matrix [G, D, D]` | 4 G D^2 |
| low-rank | `factor [G, D, r]`, `noise [G]`: U U^T + s I | 4 G D r |
| diagonal | `variance [G, D]` | 4 G D |
| isotropic | `noise [G]` | 4 G |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import ClassVar, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

SameCovariance = TypeVar("SameCovariance", bound="Covariance")

SIZE_LIMIT = 256 * 2**20  # bytes that the covariances of one set of Gaussians may take before structure is imposed
MAX_RANK = 64


@dataclass(frozen=True, eq=False)
class Covariance(ABC):
    """G symmetric positive semi-definite matrices of D x D."""

    family: ClassVar[str]

    @classmethod
    @abstractmethod
    def zeros(cls: type[SameCovariance], count: int, dim: int, rank: int, like: Tensor) -> SameCovariance:
        """G zero matrices with the dtype and device of `like`."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Write all matrices out: `[G, D, D]`."""

    @abstractmethod
    def plus(self: SameCovariance, ridge: float) -> SameCovariance:
        """Add `ridge` to every diagonal."""

    @abstractmethod
    def scaled(self: SameCovariance, factor: Tensor) -> SameCovariance:
        """Multiply each matrix by its own `factor [G]`."""

    @abstractmethod
    def blended(self: SameCovariance, rate: Tensor, weights: Tensor, deviations: Tensor) -> SameCovariance:
        """Apply the running update of eq. 11 to each matrix, exactly, with gradients to `deviations`.

        `Sigma' = (1 - a n) Sigma + a sum_i w_i d_i d_i^T - delta delta^T`, `delta = a sum_i w_i d_i`, `n = sum_i w_i`,
        with `rate a [G]`, `weights w [G, n_max]` (0: padding) and `deviations d [G, n_max, D]`.
        """

    def compacted(self: SameCovariance, rank: int) -> SameCovariance:
        """Bring the storage to its bound; only the low-rank family changes its width."""
        return self

    @abstractmethod
    def mahalanobis(self, vectors: Tensor) -> Tensor:
        """Compute `v^T Sigma^-1 v` of `vectors [G, D]`: `[G]`."""

    @abstractmethod
    def trace_solve(self: SameCovariance, other: SameCovariance) -> Tensor:
        """Compute `tr(Sigma^-1 Other)`: `[G]`."""

    @abstractmethod
    def logdet(self) -> Tensor:
        """Compute `log |Sigma|`: `[G]`."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Write the diagonals out: `[G, D]`."""

    def tensors(self) -> dict[str, Tensor]:
        """Give the stored tensors by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def map(self: SameCovariance, change: Callable[[Tensor], Tensor]) -> SameCovariance:
        """Apply `change` to every stored tensor."""
        return replace(self, **{name: change(tensor) for name, tensor in self.tensors().items()})

    def rows(self: SameCovariance, index: Tensor) -> SameCovariance:
        """Take the matrices at `index [G']`."""
        return self.map(lambda tensor: tensor[index])


@dataclass(frozen=True, eq=False)
class Full(Covariance):
    """Unrestricted matrices.

    >>> Full(2 * torch.eye(3)[None]).logdet().exp()
    tensor([8.0000])
    """

    family: ClassVar[str] = "full"
    matrix: Tensor  # [G, D, D]

    @classmethod
    def zeros(cls, count: int, dim: int, rank: int, like: Tensor) -> Full:
        return cls(like.new_zeros(count, dim, dim))

    @cached_property
    def _factor(self) -> Tensor:
        factor, failed = torch.linalg.cholesky_ex(self.matrix)
        # Not positive definite gives NaN, and the update refuses that step; an exception would end the stream.
        return torch.where((failed > 0)[:, None, None], torch.nan, factor)

    @cached_property
    def precision(self) -> Tensor:
        """The inverses `[G, D, D]`."""
        return torch.cholesky_inverse(self._factor)

    def dense(self) -> Tensor:
        return self.matrix

    def plus(self, ridge: float) -> Full:
        return Full(self.matrix + ridge * torch.eye(self.matrix.shape[-1]).to(self.matrix))

    def scaled(self, factor: Tensor) -> Full:
        return Full(self.matrix * factor[:, None, None])

    def blended(self, rate: Tensor, weights: Tensor, deviations: Tensor) -> Full:
        weighted = weights[:, :, None] * deviations
        delta = rate[:, None] * weighted.sum(1)
        scatter = rate[:, None, None] * (deviations.mT @ weighted)
        return Full(self.scaled(1 - rate * weights.sum(1)).matrix + scatter - delta[:, :, None] * delta[:, None, :])

    def mahalanobis(self, vectors: Tensor) -> Tensor:
        return torch.einsum("gi,gij,gj->g", vectors, self.precision, vectors)

    def trace_solve(self, other: Full) -> Tensor:
        return (self.precision * other.matrix).sum((1, 2))

    def logdet(self) -> Tensor:
        return 2 * self._factor.diagonal(dim1=1, dim2=2).log().sum(1)

    def diagonal(self) -> Tensor:
        return self.matrix.diagonal(dim1=1, dim2=2)

    def rows(self, index: Tensor) -> Full:
        taken = super().rows(index)
        if "precision" in self.__dict__:  # constant anchors are inverted once, not once a step
            taken.__dict__["precision"] = self.precision[index]
        return taken


@dataclass(frozen=True, eq=False)
class Diagonal(Covariance):
    """Matrices with nothing beside the diagonal.

    >>> Diagonal(torch.tensor([[1.0, 4.0]])).mahalanobis(torch.ones(1, 2))
    tensor([1.2500])
    """

    family: ClassVar[str] = "diagonal"
    variance: Tensor  # [G, D]

    @classmethod
    def zeros(cls, count: int, dim: int, rank: int, like: Tensor) -> Diagonal:
        return cls(like.new_zeros(count, dim))

    def dense(self) -> Tensor:
        return torch.diag_embed(self.variance)

    def plus(self, ridge: float) -> Diagonal:
        return Diagonal(self.variance + ridge)

    def scaled(self, factor: Tensor) -> Diagonal:
        return Diagonal(self.variance * factor[:, None])

    def blended(self, rate: Tensor, weights: Tensor, deviations: Tensor) -> Diagonal:
        weighted = weights[:, :, None] * deviations
        delta = rate[:, None] * weighted.sum(1)
        scatter = rate[:, None] * (weighted * deviations).sum(1)
        return Diagonal(self.scaled(1 - rate * weights.sum(1)).variance + scatter - delta.square())

    def mahalanobis(self, vectors: Tensor) -> Tensor:
        return (vectors.square() / self.variance).sum(1)

    def trace_solve(self, other: Diagonal) -> Tensor:
        return (other.variance / self.variance).sum(1)

    def logdet(self) -> Tensor:
        return self.variance.log().sum(1)

    def diagonal(self) -> Tensor:
        return self.variance


@dataclass(frozen=True, eq=False)
class LowRank(Covariance):
    """Matrices `U U^T + s I`; all arithmetic stays in r dimensions (Woodbury).

    >>> LowRank(torch.ones(1, 2, 1), torch.ones(1)).dense()
    tensor([[[2., 1.],
             [1., 2.]]])
    """

    family: ClassVar[str] = "low-rank"
    factor: Tensor  # U [G, D, r]
    noise: Tensor  # s [G]

    @classmethod
    def zeros(cls, count: int, dim: int, rank: int, like: Tensor) -> LowRank:
        return cls(like.new_zeros(count, dim, rank), like.new_zeros(count))

    @cached_property
    def _inner(self) -> Full:
        """`M = I + U^T U / s [G, r, r]`, the matrix that Woodbury's identity inverts instead of Sigma."""
        return Full(self.factor.mT @ self.factor / self.noise[:, None, None]).plus(1.0)

    def dense(self) -> Tensor:
        return self.factor @ self.factor.mT + torch.diag_embed(self.noise[:, None].expand(self.factor.shape[:2]))

    def plus(self, ridge: float) -> LowRank:
        return LowRank(self.factor, self.noise + ridge)

    def scaled(self, factor: Tensor) -> LowRank:
        return LowRank(self.factor * factor.sqrt()[:, None, None], self.noise * factor)

    def blended(self, rate: Tensor, weights: Tensor, deviations: Tensor) -> LowRank:
        # With s_i = sqrt(w_i) and e_i = s_i d_i: a e^T e - delta delta^T = a e^T (I - a s s^T) e, and
        # I - a s s^T = (I - c s s^T)^2 for c = (1 - sqrt(1 - a n)) / n, n = s^T s.
        roots, count = weights.sqrt()[:, :, None], weights.sum(1)
        keep = (1 - rate * count).clamp_min(0)
        correction = (1 - keep.sqrt()) / count.clamp_min(1e-12)
        scaled = roots * deviations
        centred = scaled - correction[:, None, None] * roots * (roots * scaled).sum(1, keepdim=True)
        kept = self.scaled(keep)
        added = (rate.sqrt()[:, None, None] * centred).mT  # [G, D, n_max]
        return LowRank(torch.cat([kept.factor, added], 2), kept.noise)

    def compacted(self, rank: int) -> LowRank:
        """Keep the `rank` largest directions; the rest goes into `s`, so the trace is unchanged (probabilistic PCA)."""
        dim, width = self.factor.shape[1:]
        if width <= rank:
            return LowRank(F.pad(self.factor, (0, rank - width)), self.noise)
        values, vectors = torch.linalg.eigh(self.factor.mT @ self.factor)  # ascending
        values = values.clamp_min(0)
        rest = values[:, :-rank].sum(1) / max(dim - rank, 1)
        directions = self.factor @ vectors[:, :, -rank:]  # norms are the square roots of the eigenvalues
        shrink = ((values[:, -rank:] - rest[:, None]).clamp_min(0) / values[:, -rank:].clamp_min(1e-30)).sqrt()
        return LowRank(directions * shrink[:, None, :], self.noise + rest)

    def mahalanobis(self, vectors: Tensor) -> Tensor:
        projected = (self.factor.mT @ vectors[:, :, None]).squeeze(2)
        return (vectors.square().sum(1) - self._inner.mahalanobis(projected) / self.noise) / self.noise

    def trace_solve(self, other: LowRank) -> Tensor:
        dim, rank = self.factor.shape[1:]
        inner = self._inner.precision
        trace_inverse = (dim - rank + inner.diagonal(dim1=1, dim2=2).sum(1)) / self.noise
        cross = self.factor.mT @ other.factor  # [G, r, r']
        explained = (cross * (inner @ cross)).sum((1, 2)) / self.noise
        return other.noise * trace_inverse + (other.factor.square().sum((1, 2)) - explained) / self.noise

    def logdet(self) -> Tensor:
        return self.factor.shape[1] * self.noise.log() + self._inner.logdet()

    def diagonal(self) -> Tensor:
        return self.factor.square().sum(2) + self.noise[:, None]


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

    def plus(self, ridge: float) -> Isotropic:
        return replace(self, noise=self.noise + ridge)

    def scaled(self, factor: Tensor) -> Isotropic:
        return replace(self, noise=self.noise * factor)

    def blended(self, rate: Tensor, weights: Tensor, deviations: Tensor) -> Isotropic:
        weighted = weights[:, :, None] * deviations
        delta = rate[:, None] * weighted.sum(1)
        scatter = rate * (weighted * deviations).sum((1, 2))
        added = (scatter - delta.square().sum(1)) / deviations.shape[2]
        return replace(self, noise=self.scaled(1 - rate * weights.sum(1)).noise + added)

    def mahalanobis(self, vectors: Tensor) -> Tensor:
        return vectors.square().sum(1) / self.noise

    def trace_solve(self, other: Isotropic) -> Tensor:
        return self.dim.to(self.noise) * other.noise / self.noise

    def logdet(self) -> Tensor:
        return self.dim.to(self.noise) * self.noise.log()

    def diagonal(self) -> Tensor:
        return self.noise[:, None].expand(-1, int(self.dim))

    def rows(self, index: Tensor) -> Isotropic:
        return replace(self, noise=self.noise[index])


FAMILIES: dict[str, type[Covariance]] = {cls.family: cls for cls in (Full, LowRank, Diagonal, Isotropic)}


@dataclass(frozen=True, eq=False)
class Gaussians:
    """G Gaussians of D dimensions.

    >>> Gaussians(torch.zeros(2, 3), Isotropic(torch.ones(2), torch.tensor(3))).rows(torch.tensor([1])).mean.shape
    torch.Size([1, 3])
    """

    mean: Tensor  # [G, D]
    covariance: Covariance

    def rows(self, index: Tensor) -> Gaussians:
        """Take the Gaussians at `index [G']`."""
        return Gaussians(self.mean[index], self.covariance.rows(index))

    def map(self, change: Callable[[Tensor], Tensor]) -> Gaussians:
        """Apply `change` to every stored tensor."""
        return Gaussians(change(self.mean), self.covariance.map(change))

    def plus(self, ridge: float) -> Gaussians:
        """Add `ridge` to every covariance's diagonal."""
        return Gaussians(self.mean, self.covariance.plus(ridge))

    def as_family(self, family: str, rank: int = MAX_RANK) -> Gaussians:
        """Convert to another family: exactly where it can hold the matrices, else by the nearest that it can."""
        return Gaussians(self.mean, _convert(self.covariance, family, rank, self.mean))


def _convert(covariance: Covariance, family: str, rank: int, mean: Tensor) -> Covariance:
    if covariance.family == family:
        return covariance.compacted(rank)
    if family == "full":
        return Full(covariance.dense())
    if family == "diagonal":
        return Diagonal(covariance.diagonal().clone())
    if family == "isotropic":
        return Isotropic(covariance.diagonal().mean(1), torch.tensor(mean.shape[1]))
    if isinstance(covariance, Isotropic):
        return LowRank(mean.new_zeros(*mean.shape, 0), covariance.noise)
    values, vectors = torch.linalg.eigh(covariance.dense())
    return LowRank(vectors * values.clamp_min(0).sqrt()[:, None, :], mean.new_zeros(len(mean))).compacted(rank)


def choose_family(count: int, dim: int) -> tuple[str, int]:
    """Choose the family for G Gaussians of D dimensions by size: full up to 256 MiB, then the highest rank that fits.

    The rank is at most 64 and at least 8; where even 8 does not fit, the family is diagonal.

    >>> choose_family(10, 2048), choose_family(100, 2048), choose_family(1000, 2048)
    (('full', 64), ('low-rank', 64), ('low-rank', 32))
    """
    if 4 * count * dim * dim <= SIZE_LIMIT:
        return "full", MAX_RANK
    rank = min(MAX_RANK, SIZE_LIMIT // (4 * count * dim))
    return ("low-rank", rank) if rank >= 8 else ("diagonal", rank)
