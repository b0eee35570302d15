"""Which commit a record says that its code was."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ttac.common import environment


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", folder, *identity, *words], check=True, capture_output=True)


def test_the_commit_is_that_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "src/ttac"
    for name in ("common/environment.py", "bench/job.py"):
        (package / name).parent.mkdir(parents=True)
        (package / name).write_text("")
    monkeypatch.setattr(environment, "__file__", str(package / "common/environment.py"))
    commit = environment.code_commit.__wrapped__
    assert commit() is None  # no git
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "somebody's own")
    assert commit() is None  # the code is none of it
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "all")
    head = subprocess.run(["git", "-C", tmp_path, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    assert commit() == head.stdout.strip()
    (package / "bench/job.py").write_text("changed")
    assert commit() == head.stdout.strip() + "+"
