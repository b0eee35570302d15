"""The wheel has all that the package needs, and works from any folder of an environment of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from ttac.evaluation.records import Record

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def run(*words: str | Path, **settings: str | Path | dict[str, str]) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False, **settings)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build it from a copy: builds leave files beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder / "dist", folder)
    (found,) = (folder / "dist").iterdir()
    return found


def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    package = ROOT / "src/ttac"
    files = {path.relative_to(ROOT / "src").as_posix() for path in package.rglob("*") if path.is_file()}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in files if "__pycache__" not in name} == {name for name in names if name.startswith("ttac/")}


def test_a_fresh_environment_runs_experiments_by_name(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    run(sys.executable, "-m", "pip", "--python", tmp_path / "venv", "install", "--no-deps", "--no-index", wheel)
    (packages,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    # torch and the others are those of this environment; a plain line of a .pth file brings no editable installs along.
    (packages / "others.pth").write_text(f"{Path(np.__file__).parents[1]}\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    mine = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    environment = {**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, **mine}
    python, ttac = (tmp_path / "venv/bin" / name for name in ("python", "ttac"))

    place = run(python, "-c", "import ttac; print(ttac.__file__)", cwd=empty, env=environment)
    assert Path(place.strip()).is_relative_to(packages)
    assert "ttac++" in run(ttac, "methods", cwd=empty, env=environment)
    only = "n-o-sf-bn-*-contrast-*"
    run(ttac, "bench", "protocols", "--scale", "tiny", "--only", only, cwd=empty, env=environment)
    (record,) = (empty / "results/protocols/tiny").glob("n-o-sf-bn-*.json")
    assert Record.load(record).samples == 150
