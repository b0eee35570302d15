"""TTAC+SHOT: TTAC with SHOT's information maximisation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ttac.adaptation.method import EVERY_PROTOCOL, Capabilities
from ttac.common.options import setting
from ttac.methods.registry import register
from ttac.methods.ttac import FAST, PAPER, TTAC, TTACOptions


@dataclass(frozen=True)
class TTACShotOptions(TTACOptions):
    """TTAC's options, and the weight of information maximisation."""

    # As small as TTAC++'s self-training, and for its reason.
    information_weight: float = setting(0.1, "of entropy and diversity, SHOT's information maximisation", least=0)


@register
class TTACShot(TTAC):
    """Make posteriors sharp and classes evenly used, while the anchors hold the clusters in place."""

    capabilities = Capabilities(
        "ttac+shot",
        "TTAC+SHOT",
        EVERY_PROTOCOL,
        needs=("statistics",),
        changes="backbone, batch-norm statistics",
        citation="Su et al., Revisiting Realistic Test-Time Training, NeurIPS 2022; Liang et al., ICML 2020",
        may_use=("contrastive branch",),
    )
    options_type = TTACShotOptions
    # The authors' code weighs information maximisation twice as much as the divergences.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = FAST | {
        name: {**preset, "information_weight": 2 * preset["class_weight"]} for name, preset in PAPER.items()
    }
