"""TTAC++: TTAC with self-training on strong views."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ttac.data.views import strong_view
from ttac.losses import self_training
from ttac.methods.base import Capabilities, require
from ttac.methods.registry import register
from ttac.methods.ttac import PAPER, TTAC, TTACOptions


@dataclass(frozen=True)
class TTACPlusPlusOptions(TTACOptions):
    """TTAC's options, and those of self-training."""

    tau_st: float = 0.95
    self_train_weight: float = 0.1  # lambda_2
    operations: int = 2  # of RandAugment a sample
    magnitude: int = 10  # of RandAugment, 0..30

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        super().__post_init__()
        require(0 <= self.tau_st <= 1, "tau_st must be in [0, 1]", self.tau_st)
        require(self.operations >= 0, "operations must not be negative", self.operations)
        require(0 <= self.magnitude <= 30, "magnitude must be in 0..30", self.magnitude)


@register
class TTACPlusPlus(TTAC):
    """Teach the strong view of a sample what its weak view is sure of, while the anchors hold the clusters in place."""

    capabilities = Capabilities(
        name="ttac++",
        title="TTAC++",
        protocols=("N-O-SF", "N-O-SL"),
        needs=("statistics",),
        changes="backbone, batch-norm statistics",
        citation="Su et al., Revisiting Realistic Test-Time Training: Sequential Inference and Adaptation "
        "by Anchored Clustering Regularized Self-Training",
    )
    options_type = TTACPlusPlusOptions
    # The authors' code weighs self-training 20 times as much as the divergences.
    presets: ClassVar = {
        name: {**preset, "self_train_weight": 20 * preset["class_weight"]} for name, preset in PAPER.items()
    }
    options: TTACPlusPlusOptions

    def _further_losses(self, images: Tensor, posterior: Tensor) -> dict[str, Tensor]:
        options = self.options
        if not options.self_train_weight:
            return {}
        strong = strong_view(
            images, self.generator, flip=options.flip, operations=options.operations, magnitude=options.magnitude
        )
        # Strong views have statistics of their own: normalised apart, they neither bend nor enter the stored ones.
        with self.tracker.apart():
            logits = self.classifier(strong)
        return {"self_train": options.self_train_weight * self_training(logits, posterior, options.tau_st)}
