"""What a process runs on and with: versions, commit, processor, for records and bundles."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ttac import __version__


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
        "pillow": version("pillow"),
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
        asked = ["git", "-C", str(folder), "ls-files", "--error-unmatch", "common/environment.py"]
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
