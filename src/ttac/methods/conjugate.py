"""Conjugate PL: the conjugate of the source loss as a loss without labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ttac.adaptation.method import Batch, Capabilities, Method, norm_affine
from ttac.adaptation.options import GradientOptions
from ttac.adaptation.step import Loss
from ttac.common.options import setting
from ttac.methods.registry import register
from ttac.source.knowledge import Knowledge, TrainingLoss


@dataclass(frozen=True)
class ConjugateOptions(GradientOptions):
    """The published defaults: Adam with a rate of 1e-3, predictions after the step.

    The published code makes them with the window's own statistics; here they follow the stream, as for all methods.
    """

    source_loss: Literal["ce", "poly"] = setting("ce", "what the model was trained with")
    # From -1 down, some pseudo labels do not exist.
    epsilon: float = setting(1.0, "of PolyLoss, the one of its training", above=-1)
    temperature: float = setting(1.0, "divides the logits", above=0)
    optimizer: Literal["adam", "sgd"] = setting("adam", "that takes the steps")
    lr: float | None = setting(1e-3, "rate of every step", above=0)


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
class Conjugate(Method):
    """Descend on the conjugate of the loss that the source model was trained with."""

    capabilities = Capabilities(
        "conjugate",
        "Conjugate PL",
        ("N-O-SF",),
        changes="affine parameters of norm layers, batch-norm statistics",
        citation="Goyal et al., Test-Time Adaptation via Conjugate Pseudo-Labels, NeurIPS 2022",
    )
    options_type = ConjugateOptions
    # The published settings for sources that were trained with PolyLoss.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "poly-cifar10": {"source_loss": "poly", "epsilon": 6.0, "window": 200, "optimizer": "sgd"},
        "poly-imagenet": {"source_loss": "poly", "epsilon": 8.0, "window": 200, "optimizer": "sgd"},
        "poly-digits": {"source_loss": "poly", "epsilon": 6.0, "window": 200, "lr": 1e-2},
    }

    @classmethod
    def informed(cls, given: Mapping[str, Any], known: Mapping[str, Knowledge]) -> dict[str, Any]:
        """Take the loss that the source was trained with from what is known of it, where that is known."""
        loss = known.get(TrainingLoss.kind)
        if not isinstance(loss, TrainingLoss):
            return dict(given)
        told = {"source_loss": loss.name, **loss.parameters}
        for name, value in told.items():
            if given.get(name, value) != value:
                raise ValueError(
                    f"{name}={given[name]} contradicts the model, which was trained with {name}={value}: leave it out, "
                    f"or set {name}={value} over a preset"
                )
        return {**given, **told}

    def parameters(self) -> dict[str, nn.Parameter]:
        return norm_affine(self.classifier)

    def optimizer(self, values: list[Tensor]) -> torch.optim.Optimizer:
        options = self.adapter.options
        if options.optimizer == "adam":
            return torch.optim.Adam(values, betas=(options.momentum, 0.999))
        return torch.optim.SGD(values, momentum=options.momentum, nesterov=options.momentum > 0)

    def losses(self, batch: Batch) -> dict[str, Loss]:
        options = self.adapter.options
        epsilon = options.epsilon if options.source_loss == "poly" else 0.0
        return {"conjugate": conjugate_loss(batch.forward().logits / options.temperature, epsilon)}
