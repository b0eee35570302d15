"""TTT-R: test-time training on the rotation task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ttac.adaptation.method import Batch, Capabilities, Method, backbone
from ttac.adaptation.options import GradientOptions
from ttac.adaptation.step import Loss
from ttac.common.options import setting
from ttac.methods.registry import register
from ttac.model.branches import RotationBranch, rotate


@dataclass(frozen=True)
class TTTROptions(GradientOptions):
    """The published defaults: the rate that source training ended with, no momentum, 32 copies of an image.

    The published code takes one step an image, on 32 copies of it. Here a window's images share 32 steps, each on one
    copy of every image: as many copies cost as much, and no step sees one image alone.
    """

    copies: int = setting(32, "of every sample that a pass learns from, each shifted, mirrored and turned", least=1)
    flip: bool = setting(True, "whether copies are mirrored at random")
    crop: bool = setting(True, "whether copies are shifted at random")
    lr: float | None = setting(1e-3, "rate of every step", above=0)
    momentum: float = setting(0.0, "of SGD", least=0, below=1)


@register
class TTTR(Method):
    """Let the backbone keep telling, on target images, by which quarter turn each was rotated."""

    capabilities = Capabilities(
        "ttt-r",
        "TTT-R",
        ("Y-M-SL",),
        needs=("rotation branch",),
        changes="backbone, batch-norm statistics",
        citation="Sun et al., Test-Time Training with Self-Supervision for Generalization under Distribution Shifts, "
        "ICML 2020",
    )
    options_type = TTTROptions
    checked_with: ClassVar[Mapping[str, Any]] = {"copies": 2}

    def parameters(self) -> dict[str, nn.Parameter]:
        return backbone(self.classifier)

    def passes(self) -> int:
        """Walk the memory once for every copy."""
        copies: int = self.adapter.options.copies
        return copies * super().passes()

    def check_images(self, images: Tensor) -> None:
        """Refuse images that a quarter turn changes the shape of."""
        height, width = images.shape[-2:]
        if height != width:
            raise ValueError(
                f"{self.capabilities.title} turns images by 90 degrees, which takes square ones, not "
                f"{height} x {width}: crop them"
            )

    def losses(self, batch: Batch) -> dict[str, Loss]:
        branch = self.classifier.branch
        assert isinstance(branch, RotationBranch)
        # Upright images are what is predicted: the stored statistics follow them, and turned ones are normalised apart,
        # as they were in source training. The published code has one batch of turned images move them. The last copy's
        # step has the newest weights, and once is enough.
        if (batch.number + 1) % self.adapter.options.copies == 0:
            with torch.no_grad():
                batch.forward()
        turns = torch.randint(4, (len(batch),), generator=self.adapter.generator).to(batch.images.device)
        scores = branch(batch.apart(rotate(batch.weakened(), turns)).features)
        # The branch is a fixed measure here, as with the published code's `fix_ssh`; the paper lets it learn as well.
        return {"rotation": F.cross_entropy(scores, turns)}
