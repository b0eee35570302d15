"""ttac: test-time adaptation of classifiers on a live stream.

    offline    source model -> Classifier -> SourceStatistics (collected, or inferred from the head)
    online     stream -> predict -> queue -> views -> filters -> losses -> update -> metrics -> record

The public names are few: Classifier, load_model, zero_shot, SourceStatistics, adapt, evaluate, PROTOCOLS, Record and
checks. They are imported when they are first used, so that the command line answers at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttac.evaluation import checks as checks
    from ttac.evaluation.engine import evaluate as evaluate
    from ttac.evaluation.protocols import PROTOCOLS as PROTOCOLS
    from ttac.evaluation.records import Record as Record
    from ttac.methods.registry import adapt as adapt
    from ttac.model.classifier import Classifier as Classifier
    from ttac.model.zero_shot import zero_shot as zero_shot
    from ttac.source.loading import load_model as load_model
    from ttac.source.statistics import SourceStatistics as SourceStatistics

_HOMES = {
    "Classifier": "ttac.model.classifier",
    "load_model": "ttac.source.loading",
    "zero_shot": "ttac.model.zero_shot",
    "SourceStatistics": "ttac.source.statistics",
    "adapt": "ttac.methods.registry",
    "evaluate": "ttac.evaluation.engine",
    "PROTOCOLS": "ttac.evaluation.protocols",
    "Record": "ttac.evaluation.records",
    "checks": "ttac.evaluation.checks",
}
__all__ = [*_HOMES]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ttac' has no attribute {name!r}; public names: {', '.join(_HOMES)}")
    home = importlib.import_module(_HOMES[name])
    return home if name == "checks" else getattr(home, name)


def __dir__() -> list[str]:
    return sorted([*_HOMES, "__version__"])
