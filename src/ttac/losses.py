"""Losses without labels: pure functions."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def entropy(logits: Tensor) -> Tensor:
    """Compute the mean entropy of the posteriors of `logits [N, K]`.

    >>> import torch
    >>> entropy(torch.zeros(3, 4)).exp().round(decimals=3)
    tensor(4.)
    """
    log_posterior = logits.log_softmax(1)
    return -(log_posterior.exp() * log_posterior).sum(1).mean()


def self_training(strong_logits: Tensor, weak_posterior: Tensor, tau_st: float) -> Tensor:
    """Teach the strong views the confident pseudo labels of the weak views, averaged over all N (eq. 13).

    >>> import torch
    >>> self_training(torch.zeros(2, 2), torch.tensor([[1.0, 0.0], [0.5, 0.5]]), 0.95)
    tensor(0.3466)
    """
    confidence, labels = weak_posterior.detach().max(1)
    each = F.cross_entropy(strong_logits, labels, reduction="none")
    return (each * (confidence >= tau_st)).mean()
