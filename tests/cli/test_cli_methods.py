"""`ttac methods` says of every registered method what its capabilities say."""

from __future__ import annotations

import dataclasses
import json

import pytest

from ttac.cli import main
from ttac.methods.registry import methods


def test_the_table_lists_every_method(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["methods"]) == 0
    said = capsys.readouterr().out
    for heading in ("method", "protocols", "needs", "changes", "predicts"):
        assert heading in said
    lines = {line.split("│")[1].strip(): line for line in said.splitlines() if line.startswith("│")}
    for name, method in methods().items():
        assert method.capabilities.changes.split()[0] in lines[name]
        assert method.capabilities.citation not in said or method.capabilities.citation == "-"
    assert main(["methods", "--verbose"]) == 0
    said = capsys.readouterr().out
    assert all(f"{name}: {method.capabilities.citation}" in said for name, method in methods().items())
    assert "  predict = after: when a sample is predicted" in said
    assert "  presets: fast, deep, paper" in said


def test_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "--json"]) == 0
    rows = {row["method"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows.keys() == methods().keys()
    for name, method in methods().items():
        able = method.capabilities
        assert rows[name]["protocols"] == list(able.protocols)
        assert rows[name]["needs"] == list(able.needs)
        assert (rows[name]["title"], rows[name]["changes"]) == (able.title, able.changes)
        assert rows[name]["citation"] == able.citation
        assert rows[name]["presets"].keys() == method.presets.keys()
        assert list(rows[name]["options"]) == [option.name for option in dataclasses.fields(method.options_type)]
    assert rows["test"]["predicts"] == "-"
    assert rows["tent"]["options"]["lr"] == {"default": 1e-3, "help": "rate of every step"}
    assert rows["ttac++"]["predicts"] == "after"
