"""Families of covariances behind one interface, and sets of Gaussians of one family.

| family | stores | bytes (float32) |
| --- | --- | --- |
| full | `matrix [G, D, D]` | 4 G D^2 |
| low-rank | `factor [G, D, r]`, `noise [G]`: U U^T + s I | 4 G D r |
| diagonal | `variance [G, D]` | 4 G D |
| isotropic | `noise [G]` | 4 G |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ttac.gaussian.axis_aligned import Diagonal, Isotropic
from ttac.gaussian.covariance import Covariance, chunks, take
from ttac.gaussian.full import Full
from ttac.gaussian.low_rank import LowRank

SIZE_LIMIT = 256 * 2**20  # bytes that the covariances of one set of Gaussians may take before structure is imposed
MAX_RANK = 64

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
        """Take the Gaussians at `index [G']`: a view where it is one, else a copy."""
        return Gaussians(take(self.mean, index), self.covariance.rows(index))

    def pieces(self, extra: int = 0) -> Iterator[Gaussians]:
        """Give all Gaussians in pieces of bounded size, with `extra` bytes that the caller needs for each Gaussian."""
        everything = torch.arange(len(self.mean), device=self.mean.device)
        for part in chunks(len(everything), self.covariance.bytes_each() + extra):
            yield self.rows(everything[part])

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
        return covariance.compacted(rank) if isinstance(covariance, LowRank) else covariance
    if family == "full":
        return Full(covariance.dense())
    if family == "diagonal":
        return Diagonal(covariance.diagonal().clone())
    if family == "isotropic":
        return Isotropic(covariance.diagonal().mean(1), torch.tensor(mean.shape[1]))
    if isinstance(covariance, Isotropic):
        return LowRank(mean.new_zeros(*mean.shape, rank), covariance.noise)
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
