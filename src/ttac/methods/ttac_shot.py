"""TTAC+SHOT: TTAC with SHOT's information maximisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ttac.adaptation.losses import diversity, entropy
from ttac.evaluation.protocols import PROTOCOLS
from ttac.methods.base import Capabilities, require
from ttac.methods.registry import register
from ttac.methods.ttac import FAST, PAPER, TTAC, TTACOptions
from ttac.methods.views import View


@dataclass(frozen=True)
class TTACShotOptions(TTACOptions):
    """TTAC's options, and the weight of information maximisation."""

    information_weight: float = 0.1  # as small as TTAC++'s self-training, and for its reason

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        super().__post_init__()
        require(self.information_weight >= 0, "information_weight must not be negative", self.information_weight)


@register
class TTACShot(TTAC):
    """Make posteriors sharp and classes evenly used, while the anchors hold the clusters in place."""

    capabilities = Capabilities(
        name="ttac+shot",
        title="TTAC+SHOT",
        protocols=tuple(PROTOCOLS),
        needs=("statistics",),
        changes="backbone, batch-norm statistics",
        citation="Su et al., Revisiting Realistic Test-Time Training, NeurIPS 2022; Liang et al., ICML 2020",
        may_use=("contrastive branch",),
    )
    options_type = TTACShotOptions
    # The authors' code weighs information maximisation twice as much as the divergences.
    presets: ClassVar = FAST | {
        name: {**preset, "information_weight": 2 * preset["class_weight"]} for name, preset in PAPER.items()
    }
    options: TTACShotOptions

    def _further_losses(self, images: Tensor, weak: View) -> dict[str, Tensor]:
        weight = self.options.information_weight
        own = {"entropy": weight * entropy(weak.logits), "diversity": -weight * diversity(weak.logits)}
        return {**own, **super()._further_losses(images, weak)}
