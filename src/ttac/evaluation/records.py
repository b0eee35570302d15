"""One run, one JSON record that says what produced it."""

from __future__ import annotations

import dataclasses
import json
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttac.common.files import write_json

if TYPE_CHECKING:
    from pandas import DataFrame

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
    comparison: dict[str, Any] | None = None  # of `ttac adapt`: what the frozen model, BN and this method say
    guard: dict[str, Any] = field(default_factory=dict)  # its limits, what it did and how often; empty without one
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

    def to_pandas(self) -> DataFrame:
        """Give the curves over the stream as a table with one row for each point of any.

        `samples` counts the images so far, of all passes, and `segment` names the part of the stream that they have
        come to, where it has parts. `error` is that of all predictions so far in percent; each loss and each measure
        has a column, `loss/...` or `measure/...`, which is NaN where no update told it.
        """
        try:
            from pandas import DataFrame
        except ImportError as error:
            raise ImportError("record.to_pandas() needs pandas: pip install pandas") from error
        # Multi-pass protocols predict after they have learned from all images some times.
        learned = self.samples * self.provenance.get("epochs", 0)
        rows: dict[int, dict[str, Any]] = {learned + count: {"error": error} for count, error in self.cumulative_error}
        names = ["error"]
        for kind, curve in (("loss", self.losses), ("measure", self.measures)):
            for seen, values in curve:
                told = {f"{kind}/{name}": value for name, value in values.items()}
                rows.setdefault(seen - self.provenance.get("samples_before", 0), {}).update(told)
                names += told
        ends = list(accumulate(count for _, count, _ in self.segments))
        for samples, row in rows.items():
            place = bisect_left(ends, samples - learned)
            row["segment"] = self.segments[place][0] if learned < samples and place < len(ends) else None
        columns = ["samples", *(["segment"] if self.segments else []), *dict.fromkeys(names)]
        return DataFrame([{"samples": samples, **rows[samples]} for samples in sorted(rows)], columns=columns)

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
