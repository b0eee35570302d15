"""The loss of an alignment as anyone would write it: torch.distributions, dense matrices, autograd through all."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from ttac.adaptation.alignment import Alignment
from ttac.gaussian import Gaussians


class Written:
    """The equations of an alignment and the anchors that it was given, from which ridge and scale are made anew."""

    def __init__(self, alignment: Alignment, anchors: Gaussians) -> None:
        given = anchors.covariance.dense()
        self.alignment = alignment
        self.means = anchors.mean
        self.around = given + alignment.ridge * torch.eye(given.shape[1], dtype=given.dtype)
        effective = 1.0
        if alignment.distance == "kl" and not alignment.means_only:  # a distance of means does not grow with the width
            traces = [torch.linalg.solve(wide, narrow).trace() for wide, narrow in zip(self.around, given, strict=True)]
            effective = max(float(sum(traces) / len(traces)), 1.0)
        self.scale = 1 / (len(given) * effective)

    def loss(self, features: Tensor, assignment: Tensor) -> Tensor:
        """Sum the scaled distances of the Gaussians that `features [B, D]` are assigned to, by `[B]` or `[B, G]`."""
        total = features.new_zeros(())
        for k in range(len(self.means)):
            own, weights = features, assignment[:, k] if assignment.ndim == 2 else None
            if weights is None:
                own = features[assignment == k]
                weights = torch.ones_like(own[:, 0])
            if len(own):
                total = total + self.distance(k, *self._updated(k, own, weights))
        return total * self.scale

    def gradient(self, features: Tensor, assignment: Tensor) -> Tensor:
        """Differentiate the loss by the features."""
        features = features.detach().clone().requires_grad_()
        return torch.autograd.grad(self.loss(features, assignment), features)[0]

    def distance(self, k: int, mean: Tensor, covariance: Tensor) -> Tensor:
        """Compute the distance of one target, `mean [D]` and `covariance [D, D]`, from anchor k."""
        alignment, anchor, around = self.alignment, self.means[k], self.around[k]
        covariance = covariance + alignment.ridge * torch.eye(len(mean), dtype=mean.dtype)
        if alignment.means_only:
            mean, covariance = mean / mean.norm() * anchor.norm(), around
        if alignment.distance == "l2":
            means = (mean - anchor).square().sum() / around.trace()
            return means + 2 * (covariance - around).square().sum() / (around.trace() ** 2 + around.square().sum())
        # Validation would decompose every matrix once more.
        source = MultivariateNormal(anchor, around, validate_args=False)
        target = MultivariateNormal(mean, covariance, validate_args=False)
        forward = kl_divergence(source, target)
        return forward if alignment.direction == "one-sided" else forward + kl_divergence(target, source)

    def _updated(self, k: int, own: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Write eq. 11 out for one Gaussian."""
        running = self.alignment.running
        past: Gaussians = running.gaussians.rows(torch.tensor([k]))
        mean, covariance, count = past.mean[0], past.covariance.dense()[0], weights.sum()
        rate = 1 / torch.maximum((running.counts[k] + count).clamp_max(running.clip or torch.inf), count)
        deviations = own - mean
        weighted = weights[:, None] * deviations
        delta = rate * weighted.sum(0)
        if past.covariance.family in ("diagonal", "isotropic"):
            variance = covariance.diagonal()
            variance = variance + rate * ((weighted * deviations).sum(0) - count * variance) - delta.square()
            if past.covariance.family == "isotropic":
                variance = variance.mean().expand_as(variance)
            return mean + delta, torch.diag_embed(variance)
        covariance = covariance + rate * (weighted.mT @ deviations - count * covariance) - torch.outer(delta, delta)
        return mean + delta, covariance
