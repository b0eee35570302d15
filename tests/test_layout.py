"""The layout is the flow of data: imports point upstream, and what is not needed is not imported."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import ttac

PACKAGE = Path(ttac.__file__).parent
# In the order of the flow. A package may import those before it and itself.
ORDER = (
    "common", "model", "gaussian", "data", "source",
    "adaptation", "methods", "evaluation", "benchmark", "serving", "cli",
)  # fmt: skip


def imports(file: Path) -> set[str]:
    """The packages of ttac that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found |= {name.split(".")[1] for name in names if name and name.startswith("ttac.")}
    return found


def test_every_folder_has_a_place_in_the_order() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(ORDER)
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py"}


@pytest.mark.parametrize("folder", ORDER)
def test_imports_point_upstream_only(folder: str) -> None:
    allowed = set(ORDER[: ORDER.index(folder) + 1])
    wrong = {
        str(file.relative_to(PACKAGE)): sorted(imports(file) - allowed)
        for file in sorted((PACKAGE / folder).rglob("*.py"))
        if imports(file) - allowed
    }
    assert not wrong


def test_no_data_set_is_named_outside_the_data() -> None:
    named = [
        str(file.relative_to(PACKAGE))
        for folder in ("model", "gaussian", "source", "adaptation")
        for file in (PACKAGE / folder).rglob("*.py")
        if "cifar" in file.read_text().lower().replace("cifar-style", "")
    ]
    assert not named


def test_adapting_imports_neither_corruptions_nor_pickles_nor_pillow() -> None:
    code = "import json, sys, ttac; ttac.adapt; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = json.loads(done.stdout)
    unwanted = ("ttac.data", "ttac.evaluation", "ttac.benchmark", "ttac.serving", "ttac.cli", "PIL", "sklearn")
    assert [name for name in loaded if name.startswith(unwanted)] == []


def test_public_names_are_few_and_shown() -> None:
    public = {
        "Classifier",
        "load_model",
        "zero_shot",
        "SourceStatistics",
        "adapt",
        "evaluate",
        "PROTOCOLS",
        "Record",
        "checks",
    }
    assert {name for name in dir(ttac) if not name.startswith("_")} == public
    with pytest.raises(AttributeError, match="public names"):
        ttac.nothing  # noqa: B018
