"""Conjugate PL: the conjugate of the source loss as a loss without labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from ttac.methods.base import Capabilities, Moment, require
from ttac.methods.registry import register
from ttac.methods.tent import NormAdapter
from ttac.methods.windows import GradientOptions, Trial

SourceLoss = Literal["ce", "poly"]
OptimizerName = Literal["adam", "sgd"]


@dataclass(frozen=True)
class ConjugateOptions(GradientOptions):
    """The published defaults: Adam with a rate of 1e-3, predictions after the step."""

    predict: Moment = "after"
    source_loss: SourceLoss = "ce"  # what the model was trained with
    epsilon: float = 1.0  # of PolyLoss, the one of its training
    temperature: float = 1.0  # divides the logits
    optimizer: OptimizerName = "adam"
    lr: float | None = 1e-3
    momentum: float = 0.9  # Adam's first beta

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        super().__post_init__()
        for name, kinds in (("source_loss", get_args(SourceLoss)), ("optimizer", get_args(OptimizerName))):
            require(getattr(self, name) in kinds, f"{name} must be {' or '.join(kinds)}", getattr(self, name))
        require(self.epsilon > -1, "epsilon must be above -1, or some pseudo labels do not exist", self.epsilon)
        require(self.temperature > 0, "temperature must be positive", self.temperature)


# Source losses are L(h, y) = f(h) - y . g(h), with y the one-hot label and s = softmax(h). PolyLoss (Poly-1) adds
# epsilon (1 - y . s) to cross-entropy, so f(h) = logsumexp(h) + epsilon and g(h) = h + epsilon s; epsilon = 0 is
# cross-entropy. The conjugate is -L at the y where it is stationary in h, Dg(h)^T y = grad f(h):
#     (I + epsilon (diag(s) - s s^T)) y = s.
# Sherman-Morrison gives y = u / (1 - epsilon s . u) with u = s / (1 + epsilon s), and as s sums to 1 the denominator
# is the sum of u. Every 1 + epsilon s, and with them the determinant, is positive where epsilon > -1.


def conjugate_labels(posterior: Tensor, epsilon: float = 0.0) -> Tensor:
    """Solve for the conjugate pseudo labels of `posterior [N, K]` under PolyLoss, cross-entropy where epsilon is 0.

    >>> conjugate_labels(torch.tensor([[0.75, 0.25]]), epsilon=4.0)
    tensor([[0.6000, 0.4000]])
    """
    shares = posterior / (1 + epsilon * posterior)
    return shares / shares.sum(1, keepdim=True)


def conjugate_loss(logits: Tensor, epsilon: float = 0.0) -> Tensor:
    """Average the source loss of `logits [N, K]` at their conjugate pseudo labels, which move with the logits.

    >>> conjugate_loss(torch.zeros(3, 4)).exp().round(decimals=3)
    tensor(4.)
    """
    log_posterior = logits.log_softmax(1)
    posterior = log_posterior.exp()
    labels = conjugate_labels(posterior, epsilon)
    # y sums to 1: f(h) - y . g(h) = -y . log s + epsilon (1 - y . s)
    return (epsilon * (1 - (labels * posterior).sum(1)) - (labels * log_posterior).sum(1)).mean()


@register
class Conjugate(NormAdapter):
    """Descend on the conjugate of the loss that the source model was trained with."""

    capabilities = Capabilities(
        name="conjugate",
        title="Conjugate PL",
        protocols=("N-O-SF",),
        needs=(),
        changes="affine parameters of norm layers, batch-norm statistics",
        citation="Goyal et al., Test-Time Adaptation via Conjugate Pseudo-Labels, NeurIPS 2022",
    )
    options_type = ConjugateOptions
    options: ConjugateOptions
    # The published settings for sources that were trained with PolyLoss.
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "poly-cifar10": {"source_loss": "poly", "epsilon": 6.0, "window": 200, "optimizer": "sgd"},
        "poly-imagenet": {"source_loss": "poly", "epsilon": 8.0, "window": 200, "optimizer": "sgd"},
        "poly-digits": {"source_loss": "poly", "epsilon": 6.0, "window": 200, "lr": 1e-2},
    }

    def _make_optimizer(self, values: list[Tensor]) -> torch.optim.Optimizer:
        if self.options.optimizer == "adam":
            return super()._make_optimizer(values)
        return torch.optim.SGD(values, momentum=self.options.momentum, nesterov=self.options.momentum > 0)

    def _try(self, slots: Tensor, number: int) -> Trial:
        options = self.options
        with self.tracker.following(len(slots)):
            logits = self.classifier(self.queue.take(slots))
        epsilon = options.epsilon if options.source_loss == "poly" else 0.0
        return Trial({"conjugate": conjugate_loss(logits / options.temperature, epsilon)}, logits)
