"""A new method is one file, wherever it is: the one that the documentation shows."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

import ttac
import ttac.methods
from ttac import Classifier, checks
from ttac.cli import main
from ttac.methods import registry

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-method.md"


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """The page's file, which is unknown again afterwards."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    path = tmp_path / "reliable_entropy.py"
    path.write_text(code)
    yield path
    registry._METHODS.pop("reliable-entropy", None)
    for name in [name for name in sys.modules if name.endswith("reliable_entropy")]:
        del sys.modules[name]


def test_a_file_in_the_folder_is_found_and_keeps_every_promise(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ttac.methods, "__path__", [*ttac.methods.__path__, str(file.parent)])
    assert "reliable-entropy" in registry.methods()
    checks.run_all("reliable-entropy")


def test_a_file_anywhere_is_named_by_its_path(
    file: Path, tiny_classifier: Classifier, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{file}:ReliableEntropy"
    checks.run_all(name)
    adapter = ttac.adapt(tiny_classifier, name, window=4, margin=1.0)
    adapter(torch.rand(8, 3, 16, 16))
    assert adapter.counters()["steps"] == 2
    assert main(["methods", "--json"]) == 0
    assert "reliable-entropy" in capsys.readouterr().out  # from when it was loaded on


def test_an_installed_package_names_its_methods(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(file.parent)
    entry = EntryPoint("reliable-entropy", "reliable_entropy:ReliableEntropy", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry] if group == registry.ENTRY_POINTS else [])
    assert registry.methods()["reliable-entropy"].capabilities.title == "Reliable entropy"


def test_what_is_no_method_is_refused_with_the_reason(file: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_module\n")
    for name, reason in (
        (f"{tmp_path / 'none.py'}:Tent", "no file"),
        (f"{file}:Nothing", "is no method"),
        (f"{file}:math", "is no method"),
        (f"{broken}:Tent", "could not be imported: ModuleNotFoundError"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=reason):
            registry.find_method(name)


def test_a_broken_package_takes_no_other_method_away(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [EntryPoint("broken", value, registry.ENTRY_POINTS) for value in ("no_such_package:Method", "math:pi")]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)
    with pytest.warns(UserWarning, match="the method broken of a package could not be loaded"):
        assert registry.find_method("bn").capabilities.name == "bn"
