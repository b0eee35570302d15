"""TENT: entropy minimisation of the norm layers' affine parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ttac.losses import entropy
from ttac.methods.base import Capabilities, Moment, require
from ttac.methods.bn import BN, BNOptions
from ttac.methods.registry import register
from ttac.update import Updater

NORMS = (_BatchNorm, nn.GroupNorm, nn.LayerNorm)


@dataclass(frozen=True)
class TentOptions(BNOptions):
    """The published defaults: Adam with a rate of 1e-3, predictions with the window's own statistics."""

    moments = ("during",)

    predict: Moment = "during"
    lr: float = 1e-3

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        super().__post_init__()
        require(self.lr > 0, "lr must be positive", self.lr)


@register
class Tent(BN):
    """Sharpen the posteriors of every window, and return the logits that the step was made from, as published.

    A sample that comes before its window is full is predicted with the statistics and weights of that moment.
    """

    capabilities = Capabilities(
        name="tent",
        title="TENT",
        protocols=("N-O-SF", "N-M-SF"),
        needs=(),
        changes="affine parameters of norm layers, batch-norm statistics",
        citation="Wang et al., Tent: Fully Test-Time Adaptation by Entropy Minimization, ICLR 2021",
    )
    options_type = TentOptions
    options: TentOptions

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
                "TENT adapts the affine parameters of norm layers, and this model has none: use another method"
            )
        return found

    def _begin(self) -> None:
        super()._begin()
        self.updater = Updater(self._learning, lambda values: torch.optim.Adam(values, self.options.lr))

    def _update(self) -> Tensor | None:  # type: ignore[override]
        images = self.queue.images[self.queue.newest(self.options.window)]
        before = self.tracker.snapshot()
        with self.tracker.following(len(images)):
            logits = self.classifier(images)
        if not self.updater.step({"entropy": entropy(logits)}):
            self.tracker.restore(before)
            return None  # what the step was refused for is no prediction either
        return logits.detach()

    def counters(self) -> dict[str, int]:
        """Count what has happened since the last reset."""
        return {**super().counters(), "steps": self.updater.steps, "skipped_steps": self.updater.skipped}

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "updater": self.updater.state()}

    def _load(self, state: dict[str, Any]) -> None:
        super()._load(state)
        self.updater.load(state["updater"])
