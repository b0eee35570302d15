"""Losses without labels: pure functions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def entropy(logits: Tensor) -> Tensor:
    """Compute the mean entropy of the posteriors of `logits [N, K]`.

    >>> entropy(torch.zeros(3, 4)).exp().round(decimals=3)
    tensor(4.)
    """
    log_posterior = logits.log_softmax(1)
    return -(log_posterior.exp() * log_posterior).sum(1).mean()


def diversity(logits: Tensor) -> Tensor:
    """Compute the entropy of the mean posterior of `logits [N, K]`: large where all classes are used alike.

    >>> diversity(torch.tensor([[9.0, -9.0], [-9.0, 9.0]])).exp().round(decimals=3)
    tensor(2.)
    """
    mean = logits.softmax(1).mean(0)
    return -(mean * mean.clamp_min(torch.finfo(mean.dtype).tiny).log()).sum()


def filtered_labels(logits: Tensor, assignment: Tensor) -> Tensor:
    """Compute the cross-entropy of `logits [N, K]` with the labels of `assignment [N]`, -1 for none, over all N.

    >>> filtered_labels(torch.zeros(2, 2), torch.tensor([1, -1]))
    tensor(0.3466)
    """
    return F.cross_entropy(logits, assignment, ignore_index=-1, reduction="sum") / len(logits)


def self_training(strong_logits: Tensor, weak_posterior: Tensor, tau_st: float) -> Tensor:
    """Teach the strong views the confident pseudo labels of the weak views, averaged over all N (eq. 13).

    >>> self_training(torch.zeros(2, 2), torch.tensor([[1.0, 0.0], [0.5, 0.5]]), 0.95)
    tensor(0.3466)
    """
    confidence, labels = weak_posterior.detach().max(1)
    each = F.cross_entropy(strong_logits, labels, reduction="none")
    return (each * (confidence >= tau_st)).mean()
