"""How strong strong views may be, and how much self-training on them counts: what the model itself can tell."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ttac.common.state import Stateful

LEVELS = (1.0, 0.75, 0.5, 0.25, 0.0)  # that are tried on the first window
SHARE = 0.3  # of the newest step in the average agreement
PACE = 0.05  # by which the level moves an update at most


def agreement(posterior: Tensor, strong_logits: Tensor, sure: float) -> Tensor:
    """Tell the share of samples with a confident `posterior [n, K]` that have the same class on strong views: `[]`.

    All samples count where none is confident.

    >>> posterior = torch.tensor([[0.99, 0.01], [0.02, 0.98], [0.6, 0.4]])
    >>> agreement(posterior, torch.tensor([[2.0, 1.0], [2.0, 1.0], [1.0, 2.0]]), 0.95)
    tensor(0.5000)
    """
    confidence, labels = posterior.max(1)
    same = (strong_logits.detach().argmax(1) == labels).float()
    chosen = (confidence >= sure).float()
    chosen = torch.where(chosen.sum() > 0, chosen, torch.ones_like(chosen))
    return (same * chosen).sum() / chosen.sum()


class ViewStrength(Stateful):
    """The strength of strong views: as much as the model still answers as it answers the weak views.

    A source that was trained on strong views agrees with itself on them; to another they are a second domain, and what
    is taught there harms here. The level begins where the first window agrees to `target` and follows the stream.
    """

    level: float
    known: bool
    agreed: Tensor

    def __init__(self, target: float, device: torch.device) -> None:
        self.target = target
        self.declare(level=lambda: 1.0, known=lambda: False, agreed=lambda: torch.ones((), device=device))

    def begin(self, agreement_at: Callable[[float], float]) -> None:
        """Find the level of the first window: the strongest at which it agrees, the weakest where none does."""
        for level in LEVELS:
            self.level, found = level, agreement_at(level)
            if found >= self.target:
                break
        self.agreed.fill_(found)
        self.known = True

    def follow(self) -> None:
        """Move the level by what the steps since the last call have agreed to."""
        change = PACE if float(self.agreed) >= self.target else -PACE
        self.level = min(1.0, max(0.0, self.level + change))

    def observe(self, found: Tensor) -> None:
        """Note the agreement of a step."""
        self.agreed.lerp_(found.to(self.agreed), SHARE)

    def weight(self) -> Tensor:
        """Weigh self-training: fully where the target is met, not at all where views and images are unrelated."""
        return (self.agreed / self.target).clamp_max(1.0) ** 4 if self.target else torch.ones_like(self.agreed)
