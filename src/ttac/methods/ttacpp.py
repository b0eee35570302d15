"""TTAC++: TTAC with self-training on strong views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ttac.adaptation.losses import self_training
from ttac.adaptation.method import EVERY_PROTOCOL, Batch, Capabilities, View
from ttac.adaptation.step import Loss
from ttac.common.options import setting
from ttac.methods.registry import register
from ttac.methods.ttac import FAST, PAPER, TTAC, TTACOptions, contrast


@dataclass(frozen=True)
class TTACPlusPlusOptions(TTACOptions):
    """TTAC's options, and those of self-training."""

    tau_st: float = setting(0.95, "confidence from which a pseudo label teaches", least=0, most=1)
    self_train_weight: float = setting(0.5, "lambda_2", least=0)


@register
class TTACPlusPlus(TTAC):
    """Teach the strong view of a sample what its weak view is sure of, while the anchors hold the clusters in place."""

    capabilities = Capabilities(
        "ttac++",
        "TTAC++",
        EVERY_PROTOCOL,
        needs=("statistics",),
        changes="backbone, batch-norm statistics",
        citation="Su et al., Revisiting Realistic Test-Time Training: Sequential Inference and Adaptation "
        "by Anchored Clustering Regularized Self-Training",
        may_use=("contrastive branch",),
    )
    options_type = TTACPlusPlusOptions
    # The authors' code weighs self-training 20 times as much as the divergences.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = FAST | {
        name: {**preset, "self_train_weight": 20 * preset["class_weight"]} for name, preset in PAPER.items()
    }
    checked_with: ClassVar[Mapping[str, Any]] = {"tau_pp": 0.0, "tau_st": 0.0}

    def further_losses(self, batch: Batch, weak: View) -> dict[str, Loss]:
        options = self.adapter.options
        posterior = weak.posterior
        if not options.self_train_weight:
            return super().further_losses(batch, weak)
        if options.contrastive_weight:  # one pass for both losses, of which one needs the weak views' graph too
            strong = batch.strong()
            return {"self_train": self._self_train(strong, posterior), **contrast(self, weak, strong)}
        return {"self_train": lambda: self._self_train(batch.strong(), posterior)}

    def _self_train(self, strong: View, posterior: Tensor) -> Tensor:
        options = self.adapter.options
        loss: Tensor = options.self_train_weight * self_training(strong.logits, posterior, options.tau_st)
        return loss
