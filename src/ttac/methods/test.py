"""TEST: the source model as it is."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ttac.evaluation.protocols import PROTOCOLS
from ttac.methods.base import Adapter, Capabilities
from ttac.methods.registry import register


@register
class Test(Adapter):
    """Predict in eval mode with the source's statistics and learn nothing."""

    capabilities = Capabilities(
        name="test",
        title="TEST",
        protocols=tuple(PROTOCOLS),
        needs=(),
        changes="nothing",
        citation="-",
    )

    def _begin(self) -> None:
        """Keep nothing."""

    def _state(self) -> dict[str, Any]:
        return {}

    def _load(self, state: dict[str, Any]) -> None:
        """Take nothing back."""

    def _arrive(self, images: Tensor) -> Tensor:
        started = self._now()
        logits = self.predict(images)
        self.last_step.predict_seconds = self._now() - started
        return logits
