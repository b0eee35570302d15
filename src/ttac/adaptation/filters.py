"""Which pseudo labels may move the target's clusters: pure functions of posteriors and of what is remembered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

FilterKind = Literal["none", "posterior", "temporal+posterior", "soft"]


@dataclass(frozen=True, eq=False)
class Remembered:
    """What is remembered of each sample between passes: columns of the memory."""

    average: Tensor  # q~ [N, K], the moving average of its posteriors
    visits: Tensor  # [N] int64, passes so far; 0: the average means nothing yet
    excluded: Tensor  # [N] int64, passes that it still has to stay out

    @classmethod
    def blank(cls, count: int, num_classes: int) -> Remembered:
        """Remember nothing of `count` samples."""
        nothing = torch.zeros(count, dtype=torch.int64)
        return cls(torch.zeros(count, num_classes), nothing, nothing.clone())


@dataclass(frozen=True, eq=False)
class Filtered:
    """The outcome of the filters."""

    assignment: Tensor  # [N], the cluster that each sample moves, -1 where it moves none
    memory: Remembered  # with this pass in it


def filter_pseudo_labels(
    posterior: Tensor,
    memory: Remembered,
    *,
    xi: float,
    tau_tc: float,
    tau_pp: float,
    cooldown: int,
    kind: FilterKind = "temporal+posterior",
) -> Filtered:
    """Apply temporal consistency (eq. 5) and the posterior threshold (eq. 6) to `posterior [N, K]`.

    A newcomer has no earlier posterior to differ from and passes the first. A sample that the first rejects stays out
    of the next `cooldown` passes as well (the authors' code; the paper does not say). The other kinds are the paper's
    ablation: no filter, the second alone, and "soft", which assigns by the clusters instead (`responsibilities`).

    >>> sure = torch.tensor([[0.95, 0.05], [0.6, 0.4]])
    >>> filter_pseudo_labels(sure, Remembered.blank(2, 2), xi=0.9, tau_tc=-0.001, tau_pp=0.9, cooldown=5).assignment
    tensor([ 0, -1])
    """
    posterior = posterior.to(memory.average.dtype)
    confidence, labels = posterior.max(1)
    known = memory.visits > 0
    change = confidence - memory.average.gather(1, labels[:, None]).squeeze(1)
    consistent = ~known | (change > tau_tc)
    average = torch.where(known[:, None], (1 - xi) * memory.average + xi * posterior, posterior)
    excluded = torch.where(consistent, (memory.excluded - 1).clamp_min(0), cooldown)
    passed = torch.ones_like(consistent)
    if kind in ("posterior", "temporal+posterior"):
        passed = average.amax(1) > tau_pp
    if kind == "temporal+posterior":
        passed = passed & consistent & (memory.excluded == 0)
    return Filtered(torch.where(passed, labels, -1), Remembered(average, memory.visits + 1, excluded))
