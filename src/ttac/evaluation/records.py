"""One run, one JSON record that says what produced it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttac.common.files import write_json

FORMAT = "ttac.record/1"


@dataclass(frozen=True, repr=False)
class Record:
    """The outcome of one adapter on one stream."""

    samples: int
    error: float | None  # percent; None where there were no labels
    cumulative_error: list[tuple[int, float]]  # (samples so far, error so far)
    class_error: list[float | None]
    latency_ms: dict[str, dict[str, float]]  # of prediction and update: count, mean, percentiles
    seconds: float  # the whole stream, predictions and updates
    peak_memory_mib: float  # of the process
    adapter_memory_mib: float  # of what the adapter keeps between calls
    counters: dict[str, int]  # steps taken, steps skipped because something was not finite
    provenance: dict[str, Any]
    domain_error: dict[str, dict[str, float]] = field(default_factory=dict)  # samples and error, as domains first came
    segments: list[tuple[str, int, float]] = field(default_factory=list)  # name, samples and error, one after another
    losses: list[tuple[int, dict[str, float]]] = field(default_factory=list)  # (samples so far, weighted loss by name)
    measures: list[tuple[int, dict[str, float]]] = field(default_factory=list)  # likewise, what updates have noticed
    format: str = FORMAT

    def __repr__(self) -> str:
        error = "no labels" if self.error is None else f"{self.error:.2f} % error"
        about = self.provenance
        return f"Record({about.get('method')} under {about.get('protocol')}: {error}, {self.samples} samples)"

    @property
    def update_seconds(self) -> float | None:
        """The mean time of an update, None where there was none."""
        mean = self.latency_ms.get("update", {}).get("mean")
        return None if mean is None else float(mean) / 1000

    def save(self, path: Path | str) -> None:
        """Write the record as JSON, atomically."""
        write_json(path, dataclasses.asdict(self))

    @classmethod
    def load(cls, path: Path | str) -> Record:
        """Read a record that `save` wrote."""
        content = json.loads(Path(path).read_text())
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"{path} is not a record of format {FORMAT}")
        content["cumulative_error"] = [(int(count), float(error)) for count, error in content["cumulative_error"]]
        if "segments" in content:  # records of streams without domains may lack it
            content["segments"] = [(str(name), int(count), float(error)) for name, count, error in content["segments"]]
        for curve in ("losses", "measures"):
            content[curve] = [(int(count), dict(values)) for count, values in content.get(curve, [])]
        return cls(**content)
