"""Anchors of the source and the running Gaussians of the target that are drawn to them."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from ttac.gaussian import (
    Blend,
    Direction,
    Gaussians,
    RunningGaussians,
    choose_family,
    divergence,
    moment_distance,
    responsibilities,
)

Distance = Literal["kl", "l2"]


class Alignment:
    """One set of anchors and the running target Gaussians that are drawn to them.

    The target starts AT the anchors with a full count: started empty, 25 samples in 64 dimensions are singular and the
    divergence explodes.

    The covariance of inferred anchors is a convention, not knowledge, and their means have the wrong scale. So with
    `means_only` the target takes the anchors' covariance and is scaled to their norm, and the means alone are compared.
    """

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
    ) -> None:
        count, dim = anchors.mean.shape
        self.anchors = anchors.plus(ridge)
        self.ridge = ridge
        self.distance: Distance = distance
        self.direction: Direction = direction
        self.means_only = means_only
        start = anchors.as_family("isotropic") if means_only else anchors
        rank = choose_family(count, dim)[1]
        self.running = RunningGaussians(start, anchors.mean.new_full((count,), float(clip)), clip=clip, rank=rank)
        # The number of directions in which the anchors are wider than the ridge: the divergence grows with it, so
        # dividing by it lets one weight serve narrow and wide networks. Classes of one sample each have none at all.
        effective = float(self.anchors.covariance.trace_solve(anchors.covariance).mean())
        self.scale = 1 / (count if raw or distance == "l2" else count * max(effective, 1.0))

    def share(self, features: Tensor) -> Tensor:
        """Assign `features [n, D]` softly to the running Gaussians, as expectation maximisation does: `[n, G]`."""
        vectors = features.detach().to(self.anchors.mean.dtype)
        return responsibilities(self.running.gaussians.plus(self.ridge), vectors)

    def loss(self, features: Tensor, assignment: Tensor) -> tuple[Tensor, Blend]:
        """Compute the mean distance over Gaussians, up to those without samples here, which are constant."""
        blend = self.running.blend(features, assignment)
        anchors = self.anchors.rows(blend.rows)
        target = blend.gaussians.plus(self.ridge)
        if self.means_only:
            factor = anchors.mean.norm(dim=1) / target.mean.norm(dim=1).clamp_min(1e-12)
            target = Gaussians(target.mean * factor[:, None], anchors.covariance)
        each = (
            moment_distance(anchors, target) if self.distance == "l2" else divergence(anchors, target, self.direction)
        )
        return each.sum() * self.scale, blend
