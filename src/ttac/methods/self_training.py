"""Self-Training: confident pseudo labels of weak views teach strong views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ttac.adaptation.losses import self_training
from ttac.adaptation.method import Batch, Capabilities, Method, backbone
from ttac.adaptation.options import ViewOptions
from ttac.adaptation.step import Loss
from ttac.common.options import setting
from ttac.methods.registry import register


@dataclass(frozen=True)
class SelfTrainingOptions(ViewOptions):
    """FixMatch's threshold, and the views and the rate of TTAC++, which this is a part of."""

    tau_st: float = setting(0.95, "confidence from which a pseudo label teaches", least=0, most=1)


@register
class SelfTraining(Method):
    """Teach the strong view of a sample what its weak view is sure of: FixMatch's unlabelled term alone."""

    capabilities = Capabilities(
        "self-training",
        "Self-Training",
        ("N-O-SF", "N-M-SF"),
        changes="backbone, batch-norm statistics",
        citation="Sohn et al., FixMatch, NeurIPS 2020",
    )
    options_type = SelfTrainingOptions
    checked_with: ClassVar[Mapping[str, Any]] = {"tau_st": 0.0}

    def parameters(self) -> dict[str, nn.Parameter]:
        return backbone(self.classifier)

    def losses(self, batch: Batch) -> dict[str, Loss]:
        with torch.no_grad():
            weak = batch.weak()
        return {"self_train": self_training(batch.strong().logits, weak.posterior, self.adapter.options.tau_st)}
