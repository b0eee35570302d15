"""The interface of all families of covariances: G matrices of D x D, stored as their structure allows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

SameCovariance = TypeVar("SameCovariance", bound="Covariance")

CHUNK = 32 * 2**20  # bytes of matrices that are worked on at a time: one of 2048 x 2048, all of narrow features


def chunks(count: int, bytes_each: int) -> Iterator[slice]:
    """Cut `count` things into runs of at most `CHUNK` bytes, and of at least one.

    >>> list(chunks(5, CHUNK // 2))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    size = max(1, CHUNK // max(1, bytes_each))
    yield from (slice(start, min(start + size, count)) for start in range(0, count, size))


def take(tensor: Tensor, index: Tensor) -> Tensor:
    """Take the rows at `index`; one row, which may be a matrix of 16 MiB, is not copied."""
    if not tensor.ndim:
        return tensor
    return tensor.narrow(0, int(index), 1) if len(index) == 1 else tensor[index]


def positive(values: Tensor) -> Tensor:
    """Put NaN where `values` are not positive, so that a division by them cannot pass for a solution.

    >>> positive(torch.tensor([2.0, 0.0, -1.0]))
    tensor([2., nan, nan])
    """
    return values.where(values > 0, torch.nan)


@dataclass(frozen=True, eq=False)
class Covariance(ABC):
    """G symmetric positive semi-definite matrices of D x D; `vectors [G, m, D]` are m rows for each of them."""

    family: ClassVar[str]
    prepared: ClassVar[str | None] = None  # the attribute that `solve` may find made beforehand, see `prepare`

    @classmethod
    @abstractmethod
    def zeros(cls: type[SameCovariance], count: int, dim: int, rank: int, like: Tensor) -> SameCovariance:
        """G zero matrices with the dtype and device of `like`."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Write all matrices out: `[G, D, D]`."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Write the diagonals out: `[G, D]`."""

    @abstractmethod
    def plus(self: SameCovariance, ridge: float) -> SameCovariance:
        """Add `ridge` to every diagonal."""

    @abstractmethod
    def blended(self: SameCovariance, keep: Tensor, roots: Tensor, ridge: float = 0.0) -> SameCovariance:
        """Compute the family's part of `k Sigma + R^T R + ridge I` with `keep k [G]` and `roots R [G, n, D]`."""

    @abstractmethod
    def apply(self, vectors: Tensor) -> Tensor:
        """Compute `Sigma v` of each of `vectors [G, m, D]`."""

    @abstractmethod
    def solve(self, vectors: Tensor) -> Tensor:
        """Compute `Sigma^-1 v` of each of `vectors [G, m, D]`, with NaN where Sigma is not positive definite."""

    def outer(self, direction: Tensor, vectors: Tensor) -> Tensor:
        """Compute `P v` of each of `vectors [G, m, D]`, P being the family's part of `u u^T`, `direction u [G, D]`."""
        return (vectors @ direction[:, :, None]) * direction[:, None, :]

    @abstractmethod
    def trace_solve(self: SameCovariance, other: SameCovariance) -> Tensor:
        """Compute `tr(Sigma^-1 Other)`: `[G]`."""

    @abstractmethod
    def logdet(self) -> Tensor:
        """Compute `log |Sigma|`: `[G]`."""

    @abstractmethod
    def squared_norm(self) -> Tensor:
        """Compute the squared Frobenius norms: `[G]`."""

    def prepare(self) -> None:
        """Do once what `solve` would do at every call; rows that are taken later have it too."""
        if self.prepared is not None:
            getattr(self, self.prepared)

    def tensors(self) -> dict[str, Tensor]:
        """Give the stored tensors by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def bytes_each(self) -> int:
        """Say how many bytes one matrix takes."""
        return sum(tensor[:1].nbytes for tensor in self.tensors().values() if tensor.ndim)

    def bytes_blended(self, samples: int) -> int:
        """Say how many bytes one matrix takes while `samples` rows are blended into it and it is stored."""
        return self.bytes_each()

    def map(self: SameCovariance, change: Callable[[Tensor], Tensor]) -> SameCovariance:
        """Apply `change` to every stored tensor."""
        return replace(self, **{name: change(tensor) for name, tensor in self.tensors().items()})

    def store(self: SameCovariance, index: Tensor, other: SameCovariance) -> None:
        """Write the matrices of `other` to the places at `index [G']`, in the width that is stored there."""
        for name, tensor in other.tensors().items():
            if tensor.ndim:  # the isotropic family's dimension is one number for all
                self.tensors()[name][index] = tensor

    def rows(self: SameCovariance, index: Tensor) -> SameCovariance:
        """Take the matrices at `index [G']`: a view where it is one, else a copy."""
        taken = self.map(lambda tensor: take(tensor, index))
        if self.prepared in self.__dict__:
            taken.__dict__[self.prepared] = take(self.__dict__[self.prepared], index)
        return taken
