"""Made-up results of a benchmark, in the folders that `ttac bench` writes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ttac.evaluation.records import Record

ENVIRONMENT = {
    "ttac": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.6", "platform": "Linux-6.1-x86_64",
    "cpus": 2, "threads": 1, "device": "cpu", "time": "2026-01-02T03:04:05+00:00",
    "command": "ttac bench experiments/made-up.yaml --scale tiny", "commit": "0123456789abcdef", "model": "feedbeef",
}  # fmt: skip


def place(group: str, row: str, column: str, seed: int = 0, domain: str | None = "fog", **more: Any) -> dict[str, Any]:
    """Name a run; its file is named after its place."""
    words = (group, row, column, domain, seed)
    name = "-".join(str(word).replace(" ", "_").replace("/", "_") for word in words)
    return {
        "name": name, "group": group, "row": row, "column": column, "method": row.lower(), "protocol": group,
        "source": "plain", "target": "C10-C", "domain": domain, "severity": 5, "seed": seed, "options": {},
        "statistics": None, "epochs": None, "samples": None, **more,
    }  # fmt: skip


def made_up(run: dict[str, Any], error: float = 20.0, samples: int = 1000, seconds: float = 8.0, **more: Any) -> Record:
    """Make the record of a run."""
    filled: dict[str, Any] = {
        "samples": samples, "error": error, "class_error": [], "latency_ms": {}, "seconds": seconds,
        "cumulative_error": [(samples * step // 10, error + 10.0 / step) for step in range(1, 11)],
        "peak_memory_mib": 100.0, "adapter_memory_mib": 1.0, "counters": {}, "provenance": {**ENVIRONMENT, "run": run},
    }  # fmt: skip
    return Record(**{**filled, **more})


def write_results(
    root: Path, name: str, runs: Iterable[tuple[dict[str, Any], Record | None]], scale: str = "tiny", **settings: Any
) -> Path:
    """Write an experiment and the records of its runs; a run without a record is missing."""
    folder = root / name / scale
    folder.mkdir(parents=True)
    names: list[str] = []
    parts: dict[str, list[Any]] = {}
    for run, record in runs:
        run.update(experiment=name, scale=scale)
        names.append(run["name"])
        parts.setdefault(run["column"], []).append([run["target"], run["domain"], run["severity"]])
        if record is not None:
            record.save(folder / f"{run['name']}.json")
    content = {
        "format": "ttac.experiment/1", "name": name, "scale": scale, "title": f"The experiment {name}",
        "about": "Made up for a test.", "command": f"ttac bench experiments/{name}.yaml --scale {scale}",
        "published": [], "metric": "error", "by_class": False, "average": False, "figures": [], "classes": None,
        "runs": names, "parts": parts, **settings,
    }  # fmt: skip
    (folder / "experiment.json").write_text(json.dumps(content))
    return folder


def write_failure(folder: Path, run: dict[str, Any], error: str) -> None:
    """Write what a failed run leaves."""
    content = {"format": "ttac.failure/1", "run": run, "error": error, "traceback": "...", **ENVIRONMENT}
    (folder / f"{run['name']}.failed.json").write_text(json.dumps(content))
