"""Running Gaussians with clipped counts (eq. 11 and 12)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ttac.common.state import Stateful
from ttac.gaussian.covariance import chunks
from ttac.gaussian.families import FAMILIES, MAX_RANK, Gaussians
from ttac.gaussian.low_rank import LowRank


@dataclass(frozen=True, eq=False)
class Part:
    """Some Gaussians and what a minibatch brings each of them, padded to the most samples that one has.

    With `deviations d_i = z_i - mu`, `delta = a sum_i w_i d_i` and `n = sum_i w_i`, the running update is
    `mu' = mu + delta` and `Sigma' = (1 - a n) Sigma + a sum_i w_i d_i d_i^T - delta delta^T`.
    """

    rows: Tensor  # [g] which of the G Gaussians, on the host
    samples: Tensor  # [g, n] which of the features
    weights: Tensor  # w [g, n], 0: padding
    rate: Tensor  # a [g]
    counts: Tensor  # [g] samples behind each afterwards, clipped
    features: Tensor  # z [B, D] of the whole minibatch
    mean: Tensor  # mu [g, D]

    @property
    def keep(self) -> Tensor:
        """The weight of the past, `1 - a n [g]`."""
        return (1 - self.rate * self.weights.sum(1)).clamp_min(0)

    def deviations(self) -> Tensor:
        """Compute `d [g, n, D]`, which is not stored: soft assignments have G times the minibatch of it."""
        return self.features[self.samples] - self.mean[:, None]

    def delta(self, deviations: Tensor) -> Tensor:
        """Compute the step of the means: `[g, D]`."""
        return ((self.rate[:, None] * self.weights)[:, None] @ deviations).squeeze(1)

    def roots(self, deviations: Tensor) -> Tensor:
        """Compute `R [g, n, D]` with `R^T R = a sum_i w_i d_i d_i^T - delta delta^T`.

        With `s_i = sqrt(w_i)` and `e_i = s_i d_i` this is `a e^T (I - a s s^T) e`, and `I - a s s^T = (I - c s s^T)^2`
        for `c = (1 - sqrt(1 - a n)) / n`, `n = s^T s`.
        """
        roots = self.weights.sqrt()
        correction = (1 - self.keep.sqrt()) / self.weights.sum(1).clamp_min(1e-12)
        scaled = (self.rate.sqrt()[:, None] * roots)[:, :, None] * deviations
        return scaled.sub_((correction[:, None] * roots)[:, :, None] * (roots[:, None] @ scaled))


@dataclass(frozen=True, eq=False)
class Blend:
    """What a minibatch brings the Gaussians that have samples in it: light, not yet stored.

    It is valid until the next commit or load of its Gaussians, because their covariances are not copied.
    """

    parts: tuple[Part, ...]
    past: Gaussians  # what it was made from


class RunningGaussians(Stateful):
    """G Gaussians estimated from a stream of features and their assignments.

    >>> running = RunningGaussians.empty(1, 2, family="full", dtype=torch.float64)
    >>> features = torch.randn(50, 2, dtype=torch.float64)
    >>> for part in features.split(20):
    ...     running.commit(running.blend(part, torch.zeros(len(part)).long()))
    >>> torch.allclose(running.gaussians.covariance.dense()[0], torch.cov(features.mT, correction=0))
    True
    """

    gaussians: Gaussians
    counts: Tensor

    def __init__(self, start: Gaussians | Callable[[], Gaussians], counts: Tensor, *, clip: int | None = None) -> None:
        """Begin at `start`, of which a copy is taken, or what it makes, with `counts [G]` samples behind each."""
        make = start if callable(start) else partial(start.map, torch.clone)  # commits write into it
        self.clip = clip
        self.declare(gaussians=make, counts=counts.clone)

    @classmethod
    def empty(
        cls,
        count: int,
        dim: int,
        *,
        family: str,
        rank: int = MAX_RANK,
        clip: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> RunningGaussians:
        """Start with no samples at all: the first blend replaces everything."""
        if family == LowRank.family and rank < 1:
            raise ValueError(f"the rank of low-rank covariances must be at least 1, not {rank}")
        zero = torch.zeros((), dtype=dtype, device=device)

        def start() -> Gaussians:
            return Gaussians(zero.new_zeros(count, dim), FAMILIES[family].zeros(count, dim, rank, zero))

        return cls(start, zero.new_zeros(count), clip=clip)

    def blend(self, features: Tensor, assignment: Tensor) -> Blend:
        """Prepare the update of the Gaussians that `features [B, D]` are assigned to, without storing.

        `assignment` names one Gaussian a sample, `[B]` (-1: none), or has a weight for each Gaussian, `[B, G]`. The
        rate is `a = 1 / N` up to the clip and `1 / N_clip` beyond it, but never so large that `a n > 1`: a minibatch
        with more samples of one class than `N_clip` would leave a negative weight for the past.
        """
        features = features.detach().to(self.gaussians.mean.dtype)
        # Which Gaussian has which samples is found on the host, for which a GPU is waited for once, or not at all where
        # the assignment is there already.
        groups = self._group(features, assignment) if assignment.ndim == 1 else self._share(features, assignment)
        return Blend(tuple(self._part(features, *group) for group in groups), self.gaussians)

    def updated(self, part: Part, ridge: float = 0.0) -> Gaussians:
        """Compute what a part of a blend makes of its Gaussians, with `ridge` on the diagonals."""
        deviations = part.deviations()
        past = self.gaussians.covariance.rows(part.rows)
        covariance = past.blended(part.keep, part.roots(deviations), ridge)
        return Gaussians(part.mean + part.delta(deviations), covariance)

    def commit(self, blend: Blend) -> None:
        """Store a blend, which is valid until the next commit or load."""
        if blend.past is not self.gaussians:
            raise ValueError("the blend is out of date: make it again after every commit and load")
        for part in blend.parts:
            updated = self.updated(part)
            self.counts[part.rows] = part.counts
            self.gaussians.mean[part.rows] = updated.mean
            self.gaussians.covariance.store(part.rows, updated.covariance)
        self._renew()

    def _renew(self) -> None:
        """Keep the memory in a new object, which has no inverse from before a write and makes older blends invalid."""
        self.gaussians = self.gaussians.map(lambda tensor: tensor)

    def _part(self, features: Tensor, rows: Tensor, samples: Tensor, weights: Tensor) -> Part:
        count = weights.sum(1)
        counts = self.counts[rows] + count
        if self.clip is not None:
            counts = torch.maximum(counts.clamp_max(self.clip), count)
        kept = counts if self.clip is None else counts.clamp_max(self.clip)
        return Part(rows, samples, weights, 1 / counts, kept, features, self.gaussians.mean[rows])

    def _bytes_each(self, features: Tensor, samples: int) -> int:
        """Say how many bytes one Gaussian and its samples take in a part."""
        return self.gaussians.covariance.bytes_blended(samples) + samples * features[:1].nbytes

    def _group(self, features: Tensor, assignment: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Give the rows, samples and weights of parts; only Gaussians that have samples appear, whatever K is.

        The largest come first, and a part ends where a Gaussian has less than half of its first one's samples, so that
        one large class does not widen the many small ones.
        """
        assignment = assignment.cpu()
        chosen = (assignment >= 0).nonzero()[:, 0]
        rows, group, count = torch.unique(assignment[chosen], return_inverse=True, return_counts=True)
        members = chosen[torch.argsort(group, stable=True)]
        first = count.cumsum(0) - count
        by_size = torch.argsort(count, descending=True, stable=True)
        for run in _runs(count[by_size].tolist()):
            widest = int(count[by_size[run.start]])
            for piece in chunks(run.stop - run.start, self._bytes_each(features, widest)):
                taken = by_size[run][piece]
                place = torch.arange(widest)
                # Padding repeats a Gaussian's last sample, so that what is not finite stays its own.
                samples = members[first[taken, None] + place.minimum(count[taken, None] - 1)]
                yield rows[taken], samples.to(features.device), (place < count[taken, None]).to(features)

    def _share(self, features: Tensor, weights: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Let every Gaussian see all features by its weights `[B, G]`, like `_group`."""
        # NaN is kept: a Gaussian that is not positive definite shall spoil the step, not vanish from it.
        rows = (~(weights.sum(0) <= 1e-6)).nonzero()[:, 0].cpu()
        everyone = torch.arange(len(features), device=features.device)
        for piece in chunks(len(rows), self._bytes_each(features, len(features))):
            taken = rows[piece]
            yield taken, everyone.expand(len(taken), -1), weights.mT[taken].to(features)


def _runs(falling: list[int]) -> Iterator[slice]:
    """Cut falling numbers where one is less than half of its run's first.

    >>> list(_runs([9, 5, 4, 4, 1]))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    start = 0
    for place in range(1, len(falling) + 1):
        if place == len(falling) or 2 * falling[place] < falling[start]:
            yield slice(start, place)
            start = place
