"""BN: batch-norm statistics that follow the stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ttac.methods.base import Capabilities, WindowAdapter, WindowOptions, require
from ttac.methods.registry import register
from ttac.norms import BatchNormTracker
from ttac.sample_queue import SampleQueue


@dataclass(frozen=True)
class BNOptions(WindowOptions):
    """The window's options, and how much of the past counts."""

    bn_clip: int = 512  # samples that the past of the batch-norm statistics counts as, at most

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        super().__post_init__()
        require(self.bn_clip >= 1, "bn_clip must be at least 1", self.bn_clip)


@register
class BN(WindowAdapter):
    """Move the batch-norm statistics by every full window and nothing else; without such layers it is TEST."""

    capabilities = Capabilities(
        name="bn",
        title="BN",
        protocols=("N-O-SF", "N-M-SF"),
        needs=(),
        changes="batch-norm statistics",
        citation="Ioffe and Szegedy, Batch Normalization, ICML 2015; Schneider et al., NeurIPS 2020",
    )
    options_type = BNOptions
    options: BNOptions

    def _begin(self) -> None:
        self.queue = SampleQueue(self.options.window, self.classifier.num_classes)
        self.tracker = BatchNormTracker(self.classifier, clip=self.options.bn_clip)

    def _update(self) -> None:
        images = self.queue.images
        with torch.no_grad(), self.tracker.following(len(images)):
            self.classifier(images)

    def counters(self) -> dict[str, int]:
        """Count what has happened since the last reset."""
        return {**super().counters(), "refused_statistics": self.tracker.refused}

    def _state(self) -> dict[str, Any]:
        return {"queue": self.queue.state(), "batch_norm": self.tracker.state()}

    def _load(self, state: dict[str, Any]) -> None:
        self.queue.load(state["queue"])
        self.tracker.load(state["batch_norm"])
