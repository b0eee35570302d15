"""TTT-R: test-time training on the rotation task."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ttac.methods.base import Capabilities
from ttac.methods.registry import register
from ttac.methods.windows import GradientAdapter, GradientOptions, Trial
from ttac.model.branches import BranchKind, RotationBranch, rotate


@dataclass(frozen=True)
class TTTROptions(GradientOptions):
    """The published defaults: the rate that source training ended with, and no momentum."""

    lr: float | None = 1e-3
    momentum: float = 0.0


@register
class TTTR(GradientAdapter):
    """Let the backbone keep telling, on target images, by which quarter turn each was rotated."""

    capabilities = Capabilities(
        name="ttt-r",
        title="TTT-R",
        protocols=("Y-M-SL",),
        needs=("rotation branch",),
        changes="backbone, batch-norm statistics",
        citation="Sun et al., Test-Time Training with Self-Supervision for Generalization under Distribution Shifts, "
        "ICML 2020",
    )
    options_type = TTTROptions

    @property
    def branch_used(self) -> BranchKind | None:
        """The rotation branch."""
        return "rotation"

    def _check(self, images: Tensor) -> Tensor:
        images = super()._check(images)
        height, width = images.shape[-2:]
        if height != width:
            raise ValueError(
                f"{self.capabilities.title} turns images by 90 degrees, which takes square ones, not "
                f"{height} x {width}: crop them"
            )
        return images

    def _try(self, slots: Tensor, number: int) -> Trial:
        images = self.queue.take(slots)
        branch = self.classifier.branch
        assert isinstance(branch, RotationBranch)
        # Upright images are what is predicted: the stored statistics follow them, and turned ones are normalised apart,
        # as they were in source training. The published code has one batch of turned images move them.
        with torch.no_grad(), self.tracker.following(len(slots)):
            logits = self.classifier(images)
        turns = torch.randint(4, (len(slots),), generator=self.generator).to(images.device)
        with self.tracker.apart():
            scores = branch(self.classifier.features(rotate(images, turns)))
        # The branch is a fixed measure here, as with the published code's `fix_ssh`; the paper lets it learn as well.
        return Trial({"rotation": F.cross_entropy(scores, turns)}, logits)
