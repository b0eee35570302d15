"""Where the ranks of a data-parallel run agree. A single process has nothing to agree on: all is identity here.

A run on several processes is another `Reduction`: features and assignments of Gaussians are gathered (a window of B
features is smaller than D x D moments wherever B < D), batch-norm moments are summed within a pass, gradients are
averaged, and whether a step is taken is decided once for all. What a method computes of a whole window by itself (the
diversity of SHOT, contrastive negatives, T3A's supports, AdaContrast's votes) does not go through it yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class Reduction:
    """One process alone."""

    ranks = 1

    def count(self, samples: int) -> int:
        """Sum a number of samples over all ranks."""
        return samples

    def gather(self, rows: Tensor) -> Tensor:
        """Put the rows `[n, ...]` of all ranks one after another: `[N, ...]`."""
        return rows

    def own(self, rows: Tensor) -> Tensor:
        """Take this rank's rows out of what `gather` gave, or of something in the same order."""
        return rows

    def batch_norm(self, layers: Sequence[_BatchNorm]) -> AbstractContextManager[None]:
        """Let passes normalise by the statistics of all ranks."""
        return nullcontext()

    def gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average the gradients over all ranks, in place."""

    def decide(self, flag: Tensor) -> bool:
        """Tell whether a flag is set on every rank. This is the only place where a step waits for a GPU."""
        return bool(flag)
