"""TENT: entropy minimisation of the norm layers' affine parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from ttac.adaptation.losses import entropy
from ttac.methods.base import Capabilities, Moment
from ttac.methods.registry import register
from ttac.methods.windows import GradientAdapter, GradientOptions, Trial

NORMS = (_BatchNorm, _InstanceNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True)
class TentOptions(GradientOptions):
    """The published defaults: Adam with a rate of 1e-3, predictions with the window's own statistics."""

    predict: Moment = "during"
    lr: float | None = 1e-3
    momentum: float = 0.9  # Adam's first beta


class NormAdapter(GradientAdapter):
    """A gradient adapter that moves the affine parameters of norm layers alone, with Adam."""

    def _parameters_to_change(self) -> dict[str, nn.Parameter]:
        backbone = self.classifier.backbone_parameters()
        found = {
            f"{name}.{key}": value
            for name, module in self.classifier.named_modules()
            if isinstance(module, NORMS)
            for key, value in module.named_parameters(recurse=False)
            if f"{name}.{key}" in backbone
        }
        if not found:
            raise ValueError(
                f"{self.capabilities.title} adapts the affine parameters of norm layers, and this model has none: "
                "use another method"
            )
        return found

    def _make_optimizer(self, values: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.Adam(values, betas=(self.options.momentum, 0.999))


@register
class Tent(NormAdapter):
    """Sharpen the posteriors of every window, and return the logits that the step was made from, as published."""

    capabilities = Capabilities(
        name="tent",
        title="TENT",
        protocols=("N-O-SF", "N-M-SF"),
        needs=(),
        changes="affine parameters of norm layers, batch-norm statistics",
        citation="Wang et al., Tent: Fully Test-Time Adaptation by Entropy Minimization, ICLR 2021",
    )
    options_type = TentOptions

    def _try(self, slots: Tensor, number: int) -> Trial:
        with self.tracker.following(len(slots)):
            logits = self.classifier(self.queue.take(slots))
        return Trial({"entropy": entropy(logits)}, logits)
