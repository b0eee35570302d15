"""BN: batch-norm statistics that follow the stream."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ttac.methods.base import Capabilities
from ttac.methods.registry import register
from ttac.methods.windows import WindowAdapter, WindowOptions


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
    options_type = WindowOptions
    # A past that counts as one sample is forgotten at once: every window is predicted with its own statistics alone.
    presets: ClassVar[dict[str, dict[str, Any]]] = {"batch": {"bn_clip": 1, "predict": "during"}}

    def _step(self, slots: Tensor, number: int) -> Tensor:
        with torch.no_grad(), self.tracker.following(len(slots)):
            logits: Tensor = self.classifier(self.queue.take(slots))
        return logits
