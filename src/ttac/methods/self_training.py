"""Self-Training: confident pseudo labels of weak views teach strong views."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ttac.adaptation.losses import self_training
from ttac.methods.base import Capabilities, require
from ttac.methods.registry import register
from ttac.methods.views import ViewAdapter, ViewOptions
from ttac.methods.windows import Trial


@dataclass(frozen=True)
class SelfTrainingOptions(ViewOptions):
    """FixMatch's threshold, and the views and the rate of TTAC++, which this is a part of."""

    tau_st: float = 0.95

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        super().__post_init__()
        require(0 <= self.tau_st <= 1, "tau_st must be in [0, 1]", self.tau_st)


@register
class SelfTraining(ViewAdapter):
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
        images = self.queue.take(slots)
        with torch.no_grad():
            weak = self._weak(images)
        loss = self_training(self._strong(images).logits, weak.posterior, self.options.tau_st)
        return Trial({"self_train": loss}, weak.logits)
