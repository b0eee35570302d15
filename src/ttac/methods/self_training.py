"""Self-Training: confident pseudo labels of weak views teach strong views."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ttac.data.views import LARGEST_MAGNITUDE, strong_view, weak_view
from ttac.losses import self_training
from ttac.methods.base import Capabilities, require
from ttac.methods.registry import register
from ttac.methods.windows import GradientAdapter, GradientOptions, Trial


@dataclass(frozen=True)
class SelfTrainingOptions(GradientOptions):
    """FixMatch's threshold, and the views and the rate of TTAC++, which this is a part of."""

    moments = ("before", "after")  # the logits of an update are those of mirrored views

    tau_st: float = 0.95
    flip: bool = True  # whether a mirrored image is still of its class
    operations: int = 2  # of RandAugment in a strong view
    magnitude: int = 10  # of RandAugment, 0..30

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        super().__post_init__()
        require(0 <= self.tau_st <= 1, "tau_st must be in [0, 1]", self.tau_st)
        require(self.operations >= 0, "operations must not be negative", self.operations)
        rule = f"magnitude must be in 0..{LARGEST_MAGNITUDE}"
        require(0 <= self.magnitude <= LARGEST_MAGNITUDE, rule, self.magnitude)


@register
class SelfTraining(GradientAdapter):
    """Teach the strong view of a sample what its weak view is sure of: FixMatch's unlabelled term alone."""

    capabilities = Capabilities(
        name="self-training",
        title="Self-Training",
        protocols=("N-O-SF", "N-M-SF"),
        needs=(),
        changes="backbone, batch-norm statistics",
        citation="Sohn et al., FixMatch, NeurIPS 2020",
    )
    options_type = SelfTrainingOptions
    options: SelfTrainingOptions

    def _try(self, slots: Tensor, number: int) -> Trial:
        options = self.options
        images = self.queue.images[slots]
        with torch.no_grad(), self.tracker.following(len(slots)):
            weak = self.classifier(weak_view(images, self.generator, flip=options.flip, crop=False))
        view = strong_view(
            images, self.generator, flip=options.flip, operations=options.operations, magnitude=options.magnitude
        )
        # Strong views have statistics of their own: normalised apart, they neither bend nor enter the stored ones.
        with self.tracker.apart():
            strong = self.classifier(view)
        return Trial({"self_train": self_training(strong, weak.float().softmax(1), options.tau_st)}, weak)
