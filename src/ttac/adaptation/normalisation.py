"""How batch-norm statistics follow a stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ttac.adaptation.reduction import Reduction
from ttac.common.state import Stateful
from ttac.model.norms import batch_norms, batch_statistics, own_statistics, statistics_of

Snapshot = tuple[int, list[Tensor]]


class FollowingNorms(Stateful):
    """Moves batch-norm statistics by the number of samples seen, as running Gaussians move.

    A minibatch of n has the weight `n / seen`, and the past counts as at most `clip` samples: the first window replaces
    the source's statistics, later ones are averaged with it. A fixed momentum of 0.1 predicts thousands of samples with
    half-source statistics, and even a small share of the source's variances drowns those of a low-contrast target.
    """

    seen: int

    def __init__(
        self, module: nn.Module, *, clip: int, momentum: float | None = None, reduction: Reduction | None = None
    ) -> None:
        """Follow a stream by counts, or with a fixed `momentum`."""
        self.layers = batch_norms(module)
        self.clip = clip
        self.momentum = momentum
        self._reduction = reduction or Reduction()
        self.declare(seen=lambda: 0)  # the statistics themselves are the classifier's

    @contextmanager
    def following(self, samples: int) -> Iterator[None]:
        """Let one forward pass of `samples` normalise by its own statistics and move the stored ones."""
        with self._reduction.batch_norm(self.layers), batch_statistics(self.layers, self._momentum(samples)):
            yield

    def _momentum(self, samples: int) -> float:
        """Count the samples of a pass: the weight that their statistics have in the stored ones."""
        count = self._reduction.count(samples)
        self.seen = min(self.seen + count, self.clip)  # what is beyond the clip has no effect and need not be kept
        return count / max(self.seen, count) if self.momentum is None else self.momentum

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Let one forward pass normalise by its own statistics and leave the stored ones alone."""
        with self._reduction.batch_norm(self.layers), own_statistics(self.layers):
            yield

    def finite(self) -> Tensor | None:
        """Tell whether all stored statistics are finite, as a flag on their device; None where there are none."""
        floating = [buffer for buffer in statistics_of(self.layers) if buffer.is_floating_point()]
        # The largest entries, as sums of squares overflow in half precision.
        return torch.stack(torch._foreach_norm(floating, float("inf"))).isfinite().all() if floating else None

    @contextmanager
    def kept_if_finite(self, otherwise: Snapshot) -> Iterator[None]:
        """Keep what passes make of the stored statistics if that is finite on every rank, else put a snapshot back."""
        kept = False
        try:
            yield
            finite = self.finite()
            kept = finite is None or self._reduction.decide(finite)
        finally:
            if not kept:
                self.restore(otherwise)

    def snapshot(self) -> Snapshot:
        """Copy the stored statistics, for a step that may have to be undone."""
        return self.seen, [buffer.clone() for buffer in statistics_of(self.layers)]

    def restore(self, snapshot: Snapshot) -> None:
        """Put a snapshot back."""
        self.seen, copies = snapshot
        for buffer, copy in zip(statistics_of(self.layers), copies, strict=True):
            buffer.copy_(copy)
