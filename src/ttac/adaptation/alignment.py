"""Anchors of the source and the running Gaussians of the target that are drawn to them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ttac.adaptation.method import Batch
from ttac.adaptation.reduction import Reduction
from ttac.adaptation.step import Loss, Surrogate
from ttac.common.state import Stateful
from ttac.gaussian import (
    Blend,
    Direction,
    Gaussians,
    Part,
    RunningGaussians,
    divergence,
    divergence_gradients,
    moment_distance,
    moment_gradients,
    responsibilities,
)
from ttac.gaussian.covariance import chunks

Distance = Literal["kl", "l2"]


class Alignment(Stateful):
    """One set of anchors and the running target Gaussians that are drawn to them.

    The target starts AT the anchors with a full count. Started `empty`, as the authors' does, it has no count and the
    first samples replace it: 25 of them in 64 dimensions are singular and the divergence explodes.

    With a `floor`, which is the distance that the source itself has, Gaussians that are no further away do not pull,
    once they have seen so many samples that their start is forgotten.

    The covariance of inferred anchors is a convention, not knowledge, and their means have the wrong scale. So with
    `means_only` the target takes the anchors' covariance and is scaled to their norm, and the means alone are compared.
    """

    running: RunningGaussians
    seen: int

    def __init__(
        self,
        anchors: Gaussians,
        *,
        ridge: float,
        clip: int,
        means_only: bool,
        distance: Distance = "kl",
        direction: Direction = "symmetric",
        raw: bool = False,
        empty: bool = False,
        floor: float = 0.0,
        reduction: Reduction | None = None,
    ) -> None:
        count = len(anchors.mean)
        self.anchors = anchors.plus(ridge)
        self.ridge = ridge
        self.distance: Distance = distance
        self.direction: Direction = direction
        self.means_only = means_only
        start = anchors.as_family("isotropic") if means_only else anchors
        self._reduction = reduction or Reduction()
        counts = anchors.mean.new_full((count,), 0.0 if empty else float(clip))
        self.declare(running=lambda: RunningGaussians(start, counts, clip=clip))
        self.declare(seen=lambda: 0)  # samples, as far as it matters
        self.floor = floor
        self._forgotten = clip * count
        self._pulls = anchors.mean.new_ones(count)  # which Gaussians are further from their anchors than the floor
        self.scale = 1 / count
        if distance == "kl":
            self.anchors.covariance.prepare()  # constant anchors are inverted once, not once a step
        if distance == "kl" and not raw and not means_only:  # a distance of means does not grow with the width
            # The number of directions in which the anchors are wider than the ridge: the divergence grows with it, so
            # dividing by it lets one weight serve narrow and wide networks. Classes of one sample have none at all.
            effective = float(self.anchors.covariance.trace_solve(anchors.covariance).mean())
            self.scale /= max(effective, 1.0)

    def share(self, features: Tensor) -> Tensor:
        """Assign `features [n, D]` softly to the running Gaussians, as expectation maximisation does: `[n, G]`."""
        vectors = features.detach().to(self.anchors.mean.dtype)
        return responsibilities(self.running.gaussians, vectors, self.ridge)

    def distances(self) -> Tensor:
        """Compute how far the running Gaussians are from their anchors: `[G]`, exactly, which a step does not need."""
        found = []
        l2 = self.distance == "l2"
        everything = torch.arange(len(self.anchors.mean), device=self.anchors.mean.device)
        # The L2 distance is taken of dense matrices, whatever the family is.
        dense = self.anchors.mean[:1].nbytes * self.anchors.mean.shape[1]
        for rows in chunks(len(everything), dense if l2 else self.anchors.covariance.bytes_each()):
            anchors = self.anchors.rows(everything[rows])
            target = self.running.gaussians.rows(everything[rows])
            target = _rescaled(anchors, target.mean) if self.means_only else target.plus(self.ridge)
            found.append(moment_distance(anchors, target) if l2 else divergence(anchors, target, self.direction))
        return torch.cat(found)

    def look(self) -> None:
        """Find out which Gaussians can be told from their anchors, before the steps of an update."""
        told = self.floor and self.seen >= self._forgotten
        self._pulls = (self.distances() > self.floor).to(self._pulls) if told else torch.ones_like(self._pulls)

    def blend(self, features: Tensor, assignment: Tensor) -> Blend:
        """Prepare the update of the running Gaussians by `features [B, D]` of all ranks, without storing it."""
        return self.running.blend(self._reduction.gather(features.detach()), self._reduction.gather(assignment))

    def pull(self, features: Tensor, assignment: Tensor, weight: float = 1.0) -> tuple[Surrogate, Blend]:
        """Give what draws `features [B, D]`, in any precision, to the anchors, and their blend.

        The first has the gradient of the weighted mean distance over Gaussians. Its value costs more than that and no
        step needs it; it is computed of the running Gaussians as they are when it is asked for.
        """
        rows = self._reduction.gather(features.detach())
        blend = self.running.blend(rows, self._reduction.gather(assignment))
        gradient = torch.zeros_like(rows, dtype=self.anchors.mean.dtype)
        with torch.no_grad():
            for part in blend.parts:
                pulls = self._pulls[part.rows][:, None, None] * self._gradients(part)
                gradient.index_add_(0, part.samples.flatten(), pulls.flatten(0, 1))
        # Each rank has its own rows of one gradient, and gradients are averaged over ranks.
        own = weight * self._reduction.ranks * self.scale * self._reduction.own(gradient)
        pull = Surrogate((features,), (own.to(features.dtype),), lambda: weight * self.scale * self.distances().sum())
        return pull, blend

    def losses(
        self, name: str, weight: float, vectors: Tensor, batch: Batch, assignment: Tensor | None = None
    ) -> dict[str, Loss]:
        """Give the weighted pull on `vectors [n, D]` by name, none without a weight; the Gaussians follow the batch.

        All vectors are assigned to the only Gaussian unless said otherwise.
        """
        if assignment is None:
            assignment = torch.zeros(len(vectors), dtype=torch.int64)  # on the host, where groups are made
        losses: dict[str, Loss] = {}
        if weight:
            losses[name], blend = self.pull(vectors, assignment, weight)
        else:
            blend = self.blend(vectors, assignment)
        count = self._reduction.count(len(vectors))
        batch.when_taken(lambda: self._commit(blend, count))
        return losses

    def _commit(self, blend: Blend, count: int) -> None:
        self.running.commit(blend)
        self.seen = min(self.seen + count, self._forgotten)

    def _gradients(self, part: Part) -> Tensor:
        """Differentiate the distances of a part's Gaussians by their samples: `[g, n, D]`.

        With `g` and `H` the gradients by mean and covariance of the updated target, sample i has
        `a w_i (g + 2 H (d_i - delta))`.
        """
        anchors = self.anchors.rows(part.rows)
        deviations = part.deviations()
        delta = part.delta(deviations)
        shares = (part.rate[:, None] * part.weights)[:, :, None]
        if self.means_only:
            mean = part.mean + delta
            by_scaled_mean, _ = self._differentiate(anchors, _rescaled(anchors, mean), deviations[:, :0])
            return shares * _through_rescaling(by_scaled_mean, anchors.mean, mean)[:, None]
        target = self.running.updated(part, self.ridge)
        by_mean, by_covariance = self._differentiate(anchors, target, deviations - delta[:, None])
        return shares * (by_mean[:, None] + 2 * by_covariance)

    def _differentiate(self, anchors: Gaussians, target: Gaussians, vectors: Tensor) -> tuple[Tensor, Tensor]:
        if self.distance == "l2":
            return moment_gradients(anchors, target, vectors)
        return divergence_gradients(anchors, target, vectors, self.direction)


def _rescaled(anchors: Gaussians, mean: Tensor) -> Gaussians:
    """Scale `mean [G, D]` to the anchors' norms and put their covariance around it."""
    return Gaussians(mean * _factor(anchors.mean, mean), anchors.covariance)


def _factor(anchor: Tensor, mean: Tensor) -> Tensor:
    return anchor.norm(dim=1, keepdim=True) / mean.norm(dim=1, keepdim=True).clamp_min(1e-12)


def _through_rescaling(gradient: Tensor, anchor: Tensor, mean: Tensor) -> Tensor:
    """Turn the gradient by a rescaled mean into that by the `mean` itself: what changes its norm alone is lost."""
    unit = torch.nn.functional.normalize(mean, dim=1)
    return _factor(anchor, mean) * (gradient - unit * (unit * gradient).sum(1, keepdim=True))
