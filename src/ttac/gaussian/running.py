"""Running Gaussians with clipped counts (eq. 11 and 12): constants behind, gradients through the current minibatch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ttac.gaussian.families import FAMILIES, MAX_RANK, Gaussians


@dataclass(frozen=True, eq=False)
class Blend:
    """What a minibatch would make of the Gaussians it touches: differentiable, and not yet stored."""

    rows: Tensor  # [G'] which of the G Gaussians have samples in the minibatch
    gaussians: Gaussians  # the G' updated ones
    counts: Tensor  # [G'] samples behind each, clipped


class RunningGaussians:
    """G Gaussians estimated from a stream of features and their assignments.

    >>> running = RunningGaussians.empty(1, 2, family="full", dtype=torch.float64)
    >>> features = torch.randn(50, 2, dtype=torch.float64)
    >>> for part in features.split(20):
    ...     running.commit(running.blend(part, torch.zeros(len(part)).long()))
    >>> torch.allclose(running.gaussians.covariance.dense()[0], torch.cov(features.mT, correction=0))
    True
    """

    def __init__(self, gaussians: Gaussians, counts: Tensor, *, clip: int | None = None, rank: int = MAX_RANK) -> None:
        # Own memory, because commits write into it.
        self.gaussians = Gaussians(gaussians.mean, gaussians.covariance.compacted(rank)).map(torch.clone)
        self.counts = counts.clone()  # [G]
        self.clip = clip
        self.rank = rank

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
        mean = torch.zeros(count, dim, dtype=dtype, device=device)
        gaussians = Gaussians(mean, FAMILIES[family].zeros(count, dim, rank, mean))
        return cls(gaussians, mean.new_zeros(count), clip=clip, rank=rank)

    def blend(self, features: Tensor, assignment: Tensor) -> Blend:
        """Update the Gaussians that `features [B, D]` are assigned to, without storing.

        `assignment` names one Gaussian a sample, `[B]` (-1: none), or has a weight for each Gaussian, `[B, G]`. The
        rate is `a = 1 / N` up to the clip and `1 / N_clip` beyond it, but never so large that `a n > 1`: a minibatch
        with more samples of one class than `N_clip` would leave a negative weight for the past.
        """
        rows, weights, members = _group(features, assignment) if assignment.ndim == 1 else _share(features, assignment)
        count = weights.sum(1)
        past = self.gaussians.rows(rows)
        deviations = members - past.mean[:, None]  # d [G', n_max, D]
        counts = self.counts[rows] + count
        if self.clip is not None:
            counts = torch.maximum(counts.clamp_max(self.clip), count)
        rate = 1 / counts
        mean = past.mean + rate[:, None] * (weights[:, :, None] * deviations).sum(1)
        covariance = past.covariance.blended(rate, weights, deviations)
        kept = counts if self.clip is None else counts.clamp_max(self.clip)
        return Blend(rows, Gaussians(mean, covariance), kept)

    def commit(self, blend: Blend) -> None:
        """Store a blend, cut off from its graph."""
        covariance = blend.gaussians.covariance.map(Tensor.detach).compacted(self.rank)
        self.counts[blend.rows] = blend.counts
        self.gaussians.mean[blend.rows] = blend.gaussians.mean.detach()
        for name, tensor in covariance.tensors().items():
            if tensor.ndim:  # the isotropic family's dimension is one number for all
                self.gaussians.covariance.tensors()[name][blend.rows] = tensor
        # The same memory in a new object, which has no inverse cached from before the write.
        self.gaussians = self.gaussians.map(lambda tensor: tensor)

    def state(self) -> dict[str, Tensor]:
        """Give everything that the stream has made, by name."""
        return {"mean": self.gaussians.mean, "counts": self.counts, **self.gaussians.covariance.tensors()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take back what `state` gave, bit for bit."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])


def _group(features: Tensor, assignment: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sort features by Gaussian into a zero-padded block: rows `[G']`, weights `[G', n_max]`, block `[G', n_max, D]`.

    Only Gaussians that have samples appear: the others are constants to the loss, whatever K is.
    """
    chosen = assignment >= 0
    features, assignment = features[chosen], assignment[chosen]
    rows, group, count = torch.unique(assignment, return_inverse=True, return_counts=True)
    order = torch.argsort(group, stable=True)
    first = count.cumsum(0) - count
    place = torch.empty_like(group)
    place[order] = torch.arange(len(group), device=group.device) - first[group[order]]
    widest = int(count.max()) if len(count) else 0
    block = features.new_zeros(len(rows), widest, features.shape[1]).index_put((group, place), features)
    inside = torch.arange(widest, device=count.device) < count[:, None]  # not the padding
    return rows, inside.to(features), block


def _share(features: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Let every Gaussian see all features by its weights, like `_group`: `[G']`, `[G', B]`, `[G', B, D]`."""
    rows = (weights.sum(0) > 1e-6).nonzero()[:, 0]
    return rows, weights.mT[rows].to(features), features.expand(len(rows), *features.shape)
