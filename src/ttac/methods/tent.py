"""TENT: sharp posteriors by moving norm layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ttac.adaptation.losses import entropy
from ttac.adaptation.method import Batch, Capabilities, Method, norm_affine
from ttac.adaptation.options import GradientOptions
from ttac.adaptation.step import Loss
from ttac.common.options import setting
from ttac.methods.registry import register


@dataclass(frozen=True)
class TentOptions(GradientOptions):
    """The published optimizer: Adam with a rate of 1e-3.

    As all methods here, it predicts a window after the step on it. The published code returns the logits that the step
    was made from, normalised by the window's own statistics: `predict="during"`.
    """

    lr: float | None = setting(1e-3, "rate of every step", above=0)


@register
class Tent(Method):
    """Sharpen the posteriors of every window."""

    capabilities = Capabilities(
        "tent",
        "TENT",
        ("N-O-SF", "N-M-SF"),
        changes="affine parameters of norm layers, batch-norm statistics",
        citation="Wang et al., Tent: Fully Test-Time Adaptation by Entropy Minimization, ICLR 2021",
    )
    options_type = TentOptions

    def parameters(self) -> dict[str, nn.Parameter]:
        return norm_affine(self.classifier)

    def optimizer(self, values: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.Adam(values, betas=(self.adapter.options.momentum, 0.999))

    def losses(self, batch: Batch) -> dict[str, Loss]:
        return {"entropy": entropy(batch.forward().logits)}
