"""ttac: test-time adaptation of classifiers on a live stream.

    offline    source model -> Classifier -> SourceStatistics (collected, or inferred from the head)
    online     stream -> predict -> queue -> views -> filters -> losses -> update -> metrics -> record

The public names are few: Classifier, SourceStatistics, adapt, evaluate, PROTOCOLS, Record, checks. They are imported
when they are first used, so that the command line answers at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttac import checks as checks
    from ttac.classifier import Classifier as Classifier
    from ttac.engine import evaluate as evaluate
    from ttac.methods.registry import adapt as adapt
    from ttac.protocols import PROTOCOLS as PROTOCOLS
    from ttac.report.records import Record as Record
    from ttac.source.statistics import SourceStatistics as SourceStatistics

_HOMES = {
    "Classifier": "ttac.classifier",
    "SourceStatistics": "ttac.source.statistics",
    "adapt": "ttac.methods.registry",
    "evaluate": "ttac.engine",
    "PROTOCOLS": "ttac.protocols",
    "Record": "ttac.report.records",
    "checks": "ttac",
}
__all__ = [*_HOMES]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "checks":
        return importlib.import_module("ttac.checks")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'ttac' has no attribute {name!r}; public names: {', '.join(_HOMES)}")
