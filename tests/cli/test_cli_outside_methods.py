"""A method in a file of the user's own, in every command that takes a method."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from ttac import Classifier, Record
from ttac.cli import main
from ttac.cli.parsing import parse
from ttac.methods import registry
from ttac.model.networks import ResNet
from ttac.model.weights import ModelDescription
from ttac.serving.settings import ServeJob
from ttac.source.bundle import Bundle, save_bundle
from ttac.source.objectives import CrossEntropy

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-method.md"
EXPERIMENT = """
title: A method of one's own
runs: [{{methods: [bn, "{method}"], protocol: N-O-SF}}]
sources: {{plain: {{data: digits, arch: resnet8, arch_options: {{width: 4}}, epochs: 1}}}}
targets: {{noise: {{data: digits, corruptions: [gaussian_noise], severities: [5], samples: 40}}}}
options: {{window: 20, margin: 1.0}}
scales: {{tiny: {{}}}}
"""


@pytest.fixture
def method(tmp_path: Path) -> Iterator[str]:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "own.py").write_text(code)
    yield f"{tmp_path / 'own.py'}:ReliableEntropy"
    registry._METHODS.pop("reliable-entropy", None)
    for name in [name for name in sys.modules if name.endswith("_own")]:
        del sys.modules[name]


@pytest.fixture
def bundle(tmp_path: Path) -> str:
    torch.manual_seed(0)
    classifier = Classifier(ResNet(8, 10, channels=1, width=4), mean=(0.5,), std=(0.5,)).eval()
    description = ModelDescription("resnet8", 10, 1, size=(32, 32), arch_options={"width": 4})
    save_bundle(tmp_path / "bundle", Bundle(classifier, description, CrossEntropy()))
    return str(tmp_path / "bundle")


def test_evaluate_and_methods(method: str, bundle: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "record.json"
    words = [
        "--data",
        "digits",
        "--samples",
        "60",
        "--batch",
        "20",
        "--set",
        "window=20",
        "margin=1",
        "--out",
        str(out),
    ]
    assert main(["evaluate", "--model", bundle, "--method", method, *words]) == 0
    record = Record.load(out)
    assert record.provenance["method"] == "reliable-entropy"
    assert record.counters["steps"] == 3
    assert [count for count, _ in record.losses] == [20, 40, 60]
    capsys.readouterr()
    assert main(["methods", method, "--json"]) == 0
    assert [row["method"] for row in json.loads(capsys.readouterr().out)] == ["reliable-entropy"]


def test_adapt(method: str, bundle: str, tmp_path: Path) -> None:
    folder, out = tmp_path / "images", tmp_path / "out"
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(40):
        Image.fromarray(random.integers(0, 256, (32, 32), dtype=np.uint8)).save(folder / f"{number:02d}.png")
    words = ["--images", str(folder), "--batch", "10", "--set", "window=20", "margin=1", "--out", str(out)]
    assert main(["adapt", "--model", bundle, "--method", method, *words]) == 0
    assert Record.load(out / "record.json").counters["steps"] == 2


def test_bench_in_processes_of_its_own(method: str, tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(EXPERIMENT.format(method=method))
    words = ["--out", str(tmp_path / "results"), "--cache", str(tmp_path / "cache")]
    assert main(["bench", str(file), *words]) == 0
    records = {path.name: Record.load(path) for path in (tmp_path / "results/own/tiny").glob("n-o*.json")}
    assert {record.provenance["method"] for record in records.values()} == {"bn", "reliable-entropy"}


def test_serve_prepares_it(method: str, bundle: str, tmp_path: Path) -> None:
    words = ["--model", bundle, "--method", method, "--state", str(tmp_path / "state"), "--set", "margin=1"]
    job = parse("serve", ServeJob, words)
    assert job.prepare_method().adapter(Console(quiet=True)).name == "reliable-entropy"
