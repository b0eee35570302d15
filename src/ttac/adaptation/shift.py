"""How far a window is from the source, told without source data: what batch-norm layers have stored of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ttac.adaptation.reduction import Reduction
from ttac.gaussian import RIDGE, Diagonal, Gaussians, divergence
from ttac.model.norms import batch_norms

PARTS = 8  # of a window, whose differences tell how much chance moves its statistics


def stored_gaussians(classifier: nn.Module, source: Mapping[str, Tensor]) -> dict[str, Gaussians]:
    """Read what batch-norm layers have stored of the source in its state dict: a Gaussian of what enters each."""
    kept = set(batch_norms(classifier))
    return {
        name: Gaussians(
            source[f"{name}.running_mean"].float()[None], Diagonal(source[f"{name}.running_var"].float()[None])
        )
        for name, layer in classifier.named_modules()
        if layer in kept
    }


class SourceShift:
    """Compares means and variances at the inputs of batch-norm layers with those that the layers have of the source.

    A layer's distance is the symmetric KL divergence between normal distributions, in units of the window's sampling
    noise: parts of an n-th of a window are n - 1 times as far from the whole as the whole is, by chance, from what it
    was drawn from. `distance` is the median over layers; 1 is a window that could be of the source.
    """

    def __init__(self, classifier: nn.Module, source: Mapping[str, Tensor], reduction: Reduction | None = None) -> None:
        """Take the stored statistics of the batch-norm layers of `classifier` from its state dict `source`."""
        self._reduction = reduction or Reduction()
        self._anchors = stored_gaussians(classifier, source)
        self._layers = {name: classifier.get_submodule(name) for name in self._anchors}
        self.distance = math.nan  # of the window that was measured last

    @property
    def known(self) -> bool:
        """Whether the network has layers that tell."""
        return bool(self._layers)

    def weight(self) -> float:
        """Weigh what the window teaches: not at all within the noise, fully from twice the noise on, or if unknown."""
        return 1.0 if math.isnan(self.distance) else min(1.0, max(0.0, self.distance - 1))

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the window that one forward pass runs, normalised by its own statistics."""
        found: list[Tensor] = []
        hooks = [
            layer.register_forward_pre_hook(lambda _, inputs, name=name: found.append(self._distance(name, inputs[0])))
            for name, layer in self._layers.items()
        ]
        try:
            with torch.no_grad():
                yield
        finally:
            for hook in hooks:
                hook.remove()
        self.distance = float(torch.stack(found).median()) if found else math.nan

    def _distance(self, name: str, entering: Tensor) -> Tensor:
        """Compute how far what is `entering` a layer `[N, C, ...]` is from the source, in units of noise: `[]`."""
        stored = self._anchors[name]
        centre = stored.mean[0]
        # From the source's mean, as squares of large means leave no digits for variances.
        deviations = entering.float().flatten(2) if entering.ndim > 2 else entering.float()[..., None]
        deviations = deviations - centre[:, None]
        moments = torch.stack([deviations.mean(2), deviations.square().mean(2)], 1)  # [N, 2, C]
        rows = self._reduction.gather(moments)
        ridge = RIDGE * float(stored.covariance.diagonal().max())
        source = Gaussians(torch.zeros_like(stored.mean), stored.covariance).plus(ridge)
        parts = torch.stack([part.mean(0) for part in rows.chunk(PARTS)])
        whole = rows.mean(0).expand_as(parts)
        apart = divergence(_normal(whole, ridge), _normal(parts, ridge), "symmetric").mean()
        noise = (apart / max(1, len(parts) - 1)).clamp_min(torch.finfo(apart.dtype).tiny)
        return divergence(source, _normal(whole[:1], ridge), "symmetric")[0] / noise


def _normal(moments: Tensor, ridge: float) -> Gaussians:
    """Turn means and mean squares `[G, 2, C]` into Gaussians."""
    mean, square = moments.unbind(1)
    return Gaussians(mean, Diagonal((square - mean.square()).clamp_min(0))).plus(ridge)
