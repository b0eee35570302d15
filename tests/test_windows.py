"""What Windows lacks is not needed: those modules are blocked here, and the commands run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

import ttac
from ttac.evaluation import metrics
from ttac.model.networks import ResNet
from ttac.source.loading import ModelDescription, save_model

# Before anything else: names that Python has on POSIX alone, in the modules and functions of a Windows build.
BLOCKED = """
import os, signal, sys
for name in ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog"):
    sys.modules[name] = None
for name in ("fork", "forkpty", "geteuid", "getuid", "sched_getaffinity", "pread", "nice", "pipe2", "fchmod"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGHUP", "SIGKILL", "pthread_sigmask"):
    delattr(signal, name)
"""


def run(code: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(ttac.__file__).parents[1]), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", BLOCKED + code, *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=False, cwd=folder, env=environment)


def test_the_package_and_its_commands_are_imported(tmp_path: Path) -> None:
    code = """
import importlib, ttac
from ttac.cli import COMMANDS, _imported, find_command
for name in ttac.__all__:
    getattr(ttac, name)
for job, run in COMMANDS.values():
    _imported(job), _imported(run)
import ttac.benchmark.execute, ttac.benchmark.processes
"""
    done = run(code, folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_folder_is_adapted_to_and_other_processes_are_kept_out(tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = ResNet(8, 4, width=4)
    save_model(
        tmp_path / "model.safetensors",
        network,
        ModelDescription("resnet8", 4, mean=(0.0,) * 3, std=(1.0,) * 3, size=(16, 16)),
    )
    (tmp_path / "images").mkdir()
    for number in range(10):
        Image.effect_noise((16, 16), 50 + number).convert("RGB").save(tmp_path / f"images/{number}.png")
    words = ["adapt", "--model", "model.safetensors", "--images", "images", "--method", "bn", "--set", "window=4"]
    code = "from ttac.cli import main; sys.exit(main(sys.argv[1:]))"
    done = run(code, *words, "--out", "out", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "10 images predicted, 3 updates" in done.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.name != ".lock") == [
        "adapted.safetensors", "comparison.html", "predictions.csv", "record.json",
    ]  # fmt: skip

    held = """
from pathlib import Path
from ttac.cli import main
from ttac.common.resumable import alone_in
with alone_in(Path("held")):
    sys.exit(main(sys.argv[1:]))
"""
    done = run(held, *words, "--out", "held", folder=tmp_path)
    assert done.returncode == 2
    assert "another process is writing to held" in done.stderr


def test_a_server_says_where_it_runs(tmp_path: Path) -> None:
    code = "from ttac.cli import main; sys.exit(main(['serve', '--model', 'nothing/', '--state', 'state']))"
    done = run(code, folder=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "error: ttac serve needs Linux or macOS: on Windows, run it in WSL or in a container\n",
    )


def test_peak_memory_is_told_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    assert metrics._peak_elsewhere() > 10, "as macOS tells it"
    info = SimpleNamespace(peak_wset=3 * 2**20)
    process = SimpleNamespace(Process=lambda: SimpleNamespace(memory_info=lambda: info))
    monkeypatch.setitem(sys.modules, "psutil", process)
    monkeypatch.setitem(sys.modules, "resource", None)
    assert metrics._peak_elsewhere() == 3
