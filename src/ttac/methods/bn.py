"""BN: batch-norm statistics that follow the stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ttac.adaptation.method import Batch, Capabilities, Method
from ttac.adaptation.step import Loss
from ttac.methods.registry import register


@register
class BN(Method):
    """Move the batch-norm statistics by every full window and nothing else; without such layers it is TEST."""

    capabilities = Capabilities(
        "bn",
        "BN",
        ("N-O-SF", "N-M-SF"),
        changes="batch-norm statistics",
        citation="Ioffe and Szegedy, Batch Normalization, ICML 2015; Schneider et al., NeurIPS 2020",
    )
    # A past that counts as one sample is forgotten at once: every window is predicted with its own statistics alone.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"batch": {"bn_clip": 1, "predict": "during"}}

    def losses(self, batch: Batch) -> dict[str, Loss]:
        with torch.no_grad():
            batch.forward()
        return {}
