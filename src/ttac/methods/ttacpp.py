"""TTAC++: TTAC with self-training on strong views."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ttac.adaptation.losses import self_training
from ttac.evaluation.protocols import PROTOCOLS
from ttac.methods.base import Capabilities, require
from ttac.methods.registry import register
from ttac.methods.ttac import FAST, PAPER, TTAC, TTACOptions
from ttac.methods.views import View


@dataclass(frozen=True)
class TTACPlusPlusOptions(TTACOptions):
    """TTAC's options, and those of self-training."""

    tau_st: float = 0.95
    self_train_weight: float = 0.5  # lambda_2

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        super().__post_init__()
        require(0 <= self.tau_st <= 1, "tau_st must be in [0, 1]", self.tau_st)
        require(self.self_train_weight >= 0, "self_train_weight must not be negative", self.self_train_weight)


@register
class TTACPlusPlus(TTAC):
    """Teach the strong view of a sample what its weak view is sure of, while the anchors hold the clusters in place."""

    capabilities = Capabilities(
        name="ttac++",
        title="TTAC++",
        protocols=tuple(PROTOCOLS),
        needs=("statistics",),
        changes="backbone, batch-norm statistics",
        citation="Su et al., Revisiting Realistic Test-Time Training: Sequential Inference and Adaptation "
        "by Anchored Clustering Regularized Self-Training",
        may_use=("contrastive branch",),
    )
    options_type = TTACPlusPlusOptions
    # The authors' code weighs self-training 20 times as much as the divergences.
    presets: ClassVar = FAST | {
        name: {**preset, "self_train_weight": 20 * preset["class_weight"]} for name, preset in PAPER.items()
    }
    options: TTACPlusPlusOptions

    def _further_losses(self, images: Tensor, weak: View) -> dict[str, Tensor]:
        if not (self.options.self_train_weight and self.options.contrastive_weight):
            return super()._further_losses(images, weak)
        strong = self._strong(images)  # one pass for both losses, of which the contrastive one needs the weak views too
        return {**self._self_train(strong, weak.posterior), **self._contrast(weak, strong)}

    def _later_losses(self, images: Tensor, weak: View) -> Callable[[], dict[str, Tensor]] | None:
        if not self.options.self_train_weight or self.options.contrastive_weight:
            return None
        posterior = weak.posterior
        return lambda: self._self_train(self._strong(images), posterior)

    def _self_train(self, strong: View, posterior: Tensor) -> dict[str, Tensor]:
        loss = self_training(strong.logits, posterior, self.options.tau_st)
        return {"self_train": self.options.self_train_weight * loss}
