"""Running Gaussians that take a stream of features in portions of bounded size."""

from __future__ import annotations

import torch
from torch import Tensor

from ttac.gaussian import LowRank, RunningGaussians

PORTION = 16 * 2**20  # bytes of features that wait for an update of the Gaussians
SAMPLES = 128  # of one low-rank Gaussian that wait, or as many as its rank


class BufferedGaussians:
    """Collect features until an update of the Gaussians pays: it costs by the Gaussians, not by the samples.

    An update of a low-rank Gaussian decomposes a matrix of its rank and its new samples, so that too many of them at
    once cost more than they save, however small their features are.

    >>> buffered = BufferedGaussians(RunningGaussians.empty(2, 1, family="full"))
    >>> buffered.add(torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([0, 0, 1]))
    >>> buffered.finish().gaussians.mean.tolist()
    [[2.0], [5.0]]
    """

    def __init__(self, running: RunningGaussians) -> None:
        covariance = running.gaussians.covariance
        self._running = running
        self._most = max(SAMPLES, covariance.factor.shape[2]) if isinstance(covariance, LowRank) else None
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._bytes = 0
        self._counts = torch.zeros_like(running.counts, dtype=torch.long)  # waiting for each Gaussian

    def add(self, features: Tensor, groups: Tensor) -> None:
        """Take features `[N, D]` and their Gaussians `[N]`."""
        if self._most is None:
            self._wait(features, groups)
            return
        for some, own in zip(features.split(self._most), groups.split(self._most), strict=True):
            counts = torch.bincount(own, minlength=len(self._counts))
            if bool((self._counts + counts > self._most).any()):
                self.finish()
            self._counts += counts
            self._wait(some, own)

    def _wait(self, features: Tensor, groups: Tensor) -> None:
        self._waiting.append((features, groups))
        self._bytes += features.nbytes
        if self._bytes >= PORTION:
            self.finish()

    def finish(self) -> RunningGaussians:
        """Use what waits, and give the Gaussians of everything so far."""
        if self._waiting:
            features, groups = (torch.cat(parts) for parts in zip(*self._waiting, strict=True))
            self._running.commit(self._running.blend(features, groups))
            self._waiting.clear()
            self._bytes = 0
            self._counts.zero_()
        return self._running
