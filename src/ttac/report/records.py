"""One run, one JSON record that says what produced it."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch

from ttac import __version__
from ttac.files import write_json

FORMAT = "ttac.record/1"


@dataclass(frozen=True)
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
    format: str = FORMAT

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
        return cls(**content)


def environment() -> dict[str, Any]:
    """Describe the machine and the software of this process.

    >>> environment()["torch"] == torch.__version__
    True
    """
    return {
        "ttac": __version__,
        "commit": code_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "pillow": PIL.__version__,
        "platform": platform.platform(),
        "processor": processor(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


@cache
def code_commit() -> str | None:
    """Give the commit that this code was checked out from, "+" where files were changed since; None without git."""
    folder = Path(__file__).parents[1]
    # Files that git does not know may lie about; those that it ignores are none of the code either.
    questions = (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no", "--", "."])
    try:
        commit, changed = (
            subprocess.run(["git", "-C", folder, *question], capture_output=True, text=True, timeout=10, check=True)
            for question in questions
        )
        asked = ["git", "-C", str(folder), "ls-files", "--error-unmatch", "report/records.py"]
        known = subprocess.run(asked, capture_output=True)
    except (OSError, subprocess.SubprocessError):
        return None
    if known.returncode:  # installed into a folder below somebody's own repository
        return None
    return commit.stdout.strip() + ("+" if changed.stdout.strip() else "")


@cache
def processor() -> str:
    """Name the processor, and the graphics card where there is one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {torch.cuda.get_device_name()}" if torch.cuda.is_available() else name
