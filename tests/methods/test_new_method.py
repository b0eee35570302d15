"""A fourteenth method is one file: the one that the documentation shows."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ttac.methods
from ttac import checks
from ttac.cli import main, parse_options
from ttac.methods import registry

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-method.md"


@pytest.fixture
def documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Put the page's file among the methods, and take it away again."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "reliable_entropy.py").write_text(code)
    monkeypatch.setattr(ttac.methods, "__path__", [*ttac.methods.__path__, str(tmp_path)])
    yield "reliable-entropy"
    registry._METHODS.pop("reliable-entropy", None)
    sys.modules.pop("ttac.methods.reliable_entropy", None)


def test_the_documented_method_is_found_and_keeps_every_promise(documented: str) -> None:
    assert documented in registry.methods()
    checks.run_all(documented, margin=1.0)


def test_the_command_line_knows_it(documented: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_options(documented, ["margin=0.5"]) == {"margin": 0.5}
    assert main(["methods", "--json"]) == 0
    assert documented in capsys.readouterr().out
