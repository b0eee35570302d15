"""Alignment at every depth: the channel vectors of all positions of a window, drawn to those of the source.

A corruption changes the first layers' statistics first, and a gradient that starts at the features reaches them last.
A window has 16 to 1024 times as many channel vectors as images, so that no average over windows is needed. Matching
means and variances of activations is ActMAD (Mirza et al., CVPR 2023), matching covariances of features is CORAL (Sun
and Saenko, 2016); the divergence between whole Gaussians at each block is ours.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ttac.adaptation.reduction import Reduction
from ttac.adaptation.step import Surrogate
from ttac.gaussian import RIDGE, Diagonal, Full, Gaussians, divergence, divergence_gradients
from ttac.model.depths import channel_vectors
from ttac.source.depths import WINDOW

PORTION = 2**14  # vectors that are looked at together: as many as stay in a processor's cache


class DepthAlignment:
    """Anchors at the outputs of blocks; it keeps nothing of the stream.

    The loss is the mean over depths of the symmetric KL divergence of a window divided by the number of channels, as
    far as it exceeds what windows of the source itself have: a depth that cannot be told from the source does not pull.
    """

    def __init__(
        self,
        depths: Mapping[str, Gaussians],
        floors: Mapping[str, float],
        window: int,
        reduction: Reduction | None = None,
    ) -> None:
        """Align windows of `window` images with `depths`; `floors` are those of `SourceStatistics`."""
        self._reduction = reduction or Reduction()
        self._ridges = {name: RIDGE * float(anchors.covariance.diagonal().max()) for name, anchors in depths.items()}
        self.anchors = {name: anchors.plus(self._ridges[name]) for name, anchors in depths.items()}
        for anchors in self.anchors.values():
            anchors.covariance.prepare()
        self.distances: dict[str, Tensor] = {}  # of the last window
        # Told for windows of another size; noise falls with the number of samples.
        self.floors = {name: floors.get(name, 0.0) * WINDOW / window for name in self.anchors}
        self._window = window
        self._scarcity = 1.0  # the factor that smaller minibatches, such as the end of a stream, put on floors

    def pull(self, outputs: Mapping[str, Tensor], samples: int, weight: float) -> Surrogate:
        """Give what draws the first `samples` rows of each depth's output to its anchors, weighted.

        Depths that the pass has not run, such as auxiliary heads, and those that no weight moves are left out.
        """
        names = [name for name in self.anchors if name in outputs and outputs[name].requires_grad]
        if not names:
            return Surrogate((), (), lambda: torch.zeros(()))
        share = weight / len(names)
        self._scarcity = max(1.0, self._window / samples)
        with torch.no_grad():
            found = [self._differentiate(name, outputs[name].detach(), samples, share) for name in names]
        excesses, gradients = zip(*found, strict=True)
        tensors = tuple(outputs[name] for name in names)
        return Surrogate(tensors, gradients, lambda: weight * torch.stack(excesses).mean())

    def _differentiate(self, name: str, output: Tensor, samples: int, weight: float) -> tuple[Tensor, Tensor]:
        """Compute how far the first `samples` of an output are from its anchors beyond the floor, and the gradient.

        The gradient is weighted and by the whole output: what is not looked at has zeros.

        With `g` and `H` the gradients by mean and covariance, vector i of n has `(g + 2 H (x_i - mean)) / n`.
        """
        anchors, floor = self.anchors[name], self._scarcity * self.floors[name]
        everything = channel_vectors(output)
        vectors = everything[: samples * (len(everything) // len(output))]
        full, channels = isinstance(anchors.covariance, Full), vectors.shape[1]
        target = self._target(name, vectors)
        distance = divergence(anchors, target, "symmetric")[0] / channels
        self.distances[name] = distance
        mean = target.mean[0]
        basis = torch.eye(channels, dtype=mean.dtype, device=mean.device) if full else torch.ones_like(mean)[None]
        by_mean, by_covariance = divergence_gradients(anchors, target, basis[None], "symmetric")
        # Gradients are averaged over ranks.
        share = weight * self._reduction.ranks / (channels * self._reduction.count(len(vectors))) * (distance > floor)
        slope, curve = share * by_mean[0], 2 * share * by_covariance[0]
        # In the precision that the backward pass has anyway.
        shift = (slope - (mean @ curve if full else mean * curve[0])).to(output.dtype)
        curve = curve.to(output.dtype)
        gradient = torch.zeros(everything.shape, dtype=output.dtype, device=output.device)
        looked_at = gradient[: len(vectors)]
        if full:
            torch.addmm(shift, vectors, curve, out=looked_at)
        else:
            torch.addcmul(shift, vectors, curve, out=looked_at)
        excess = (distance - floor).clamp_min(0)
        if output.ndim == 3:
            return excess, gradient.view(output.shape)
        count, _, height, width = output.shape
        return excess, gradient.view(count, height, width, channels).movedim(-1, 1)

    def _target(self, name: str, vectors: Tensor) -> Gaussians:
        """Estimate the Gaussian of `vectors [n, C]` of all ranks, with the ridge."""
        anchors = self.anchors[name]
        full, centre = isinstance(anchors.covariance, Full), anchors.mean[0]
        first = torch.zeros_like(centre)
        second = torch.zeros_like(anchors.covariance.dense()[0] if full else centre)
        for portion in vectors.split(PORTION):
            deviations = portion - centre  # as squares of large means leave no digits for variances
            first += deviations.sum(0)
            if full:
                second.addmm_(deviations.mT, deviations)
            else:
                second += deviations.square().sum(0)
        count = self._reduction.count(len(vectors))
        mean, second = self._summed(first) / count, self._summed(second) / count
        covariance = (
            Full((second - torch.outer(mean, mean))[None]) if full else Diagonal((second - mean.square())[None])
        )
        return Gaussians((centre + mean)[None], covariance).plus(self._ridges[name])

    def noise(self) -> Tensor | None:
        """Tell the last window's mean distance in units of what windows of the source have, where that is known."""
        known = [distance / self.floors[name] for name, distance in self.distances.items() if self.floors[name]]
        return torch.stack(known).mean() / self._scarcity if known else None

    def _summed(self, tensor: Tensor) -> Tensor:
        return self._reduction.gather(tensor[None]).sum(0)
