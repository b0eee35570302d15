"""What tests of jobs that can be interrupted share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ttac.cli import main


def contents(folder: Path) -> dict[str, bytes]:
    """Read all files of a folder, by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def run_until_killed(preparation: str, arguments: Sequence[str]) -> None:
    """Run the command line in a process of its own, in which `preparation` sees to it that SIGKILL ends it."""
    code = f"import os, signal, sys\nfrom ttac.cli import main\n{preparation}\nmain(sys.argv[1:])\n"
    # As many threads as here, because sums that are split among threads are added in another order.
    environment = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", code, *arguments], check=False, env={**os.environ, **environment})
    assert ended.returncode == -signal.SIGKILL


def assert_refused(
    arguments: Sequence[str], out: Path, message: str, capsys: pytest.CaptureFixture[str], code: int = 2
) -> None:
    """Make sure that a command ends with a message and a code, and that it leaves a folder as it was."""
    before = contents(out) if out.is_dir() else out.exists()
    capsys.readouterr()
    assert main(arguments) == code
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert (contents(out) if out.is_dir() else out.exists()) == before
