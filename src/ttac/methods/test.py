"""TEST: the source model as it is."""

from __future__ import annotations

from ttac.adaptation.method import EVERY_PROTOCOL, Capabilities, Method
from ttac.adaptation.options import Options
from ttac.methods.registry import register


@register
class Test(Method):
    """Predict in eval mode with the source's statistics and learn nothing."""

    capabilities = Capabilities("test", "TEST", EVERY_PROTOCOL, changes="nothing", citation="-")
    options_type = Options

    def memory(self) -> None:
        """Keep no samples."""
        return
