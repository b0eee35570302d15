"""The command line itself: what every command has in common."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ttac import __version__
from ttac.cli import COMMANDS, main
from ttac.cli.parsing import parse
from ttac.common.files import user_cache
from ttac.common.options import Checked, setting


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "name a command: train, adapt, "),
        ("stats", "name a command: stats collect, stats infer"),
        ("fly", "unknown command fly"),
        ("stats inferr", "unknown command stats inferr; did you mean stats infer?"),
        ("adapt --modell x", "unknown option --modell; did you mean --model?"),
        ("adapt --mod x", "unknown option --mod; did you mean --model?"),
        ("adapt", "--model and --images and --out are missing"),
        ("report", "results and --out are missing"),
        ("adapt --model", "--model needs a value"),
        ("serve --model x --paused=yes", "--paused takes no value"),
        ("demo now", "'now' belongs to no option"),
        ("demo --seed -1", "--seed must be at least 0, not -1"),
        ("demo --seed x", "--seed must be a whole number, not 'x'"),
        ("evaluate --model m --out o --batch 0", "--batch must be at least 1, not 0"),
        ("evaluate --model m --out o --order odd", "--order must be shuffled or given or correlated, not 'odd'"),
        ("evaluate --model m --out o --severity 5 x", "--severity must be a whole number, not 'x'"),
        ("evaluate --model m --out o --imbalance inf", "--imbalance must be a finite number, not inf"),
        ("bench file.yaml --shard 3/2", "--shard must be I/N with I from 1 to N, not 3/2"),
        ("bench file.yaml --source plain", "--source must be NAME=BUNDLE, not 'plain'"),
        ("serve --model m --port 70000", "--port must be from 0 to 65535, not 70000"),
        ("demo --config nowhere.yaml", "nowhere.yaml"),
    ],
)
def test_mistakes_are_told_in_plain_words(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert said.count("\n") == 1


@dataclass(frozen=True)
class Inner(Checked):
    batch: int = setting(8, "images", least=1)
    flip: bool = setting(True, "do not mirror")


@dataclass(frozen=True)
class Outer(Checked):
    """Do it; slowly."""

    inner: Inner
    out: Path = setting(help="where it goes")
    files: tuple[Path, ...] = setting((), "what it reads", positional=True)
    mean: tuple[float, ...] | None = setting(None, "by channel")
    options: Mapping[str, Any] = setting(make=dict, help="more", option="set")
    part: tuple[int, int] = setting((1, 1), "this one", separator="/")
    only: tuple[str, ...] = setting((), "these", action="append")
    loud: bool = setting(False, "talk")
    hidden: int = setting(3, option=None)


def test_words_fill_a_dataclass_and_those_that_it_holds() -> None:
    assert parse("do", Outer, ["--out", "o"]) == Outer(Inner(), Path("o"))
    words = "a b --out=o --batch 2 --no-flip --mean 1/4 1 --set x=1 y=a=b --set z=2 --part 2/3 --only p --only q --loud"
    filled = parse("do", Outer, words.split())
    options = {"x": "1", "y": "a=b", "z": "2"}
    files, mean = (Path("a"), Path("b")), (0.25, 1.0)
    assert filled == Outer(Inner(2, False), Path("o"), files, mean, options, (2, 3), ("p", "q"), True)


def test_a_file_of_options_gives_way_to_what_is_typed(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("out: o\nbatch: 2\nflip: false\nmean: [0.5, 1e-1]\nset: {x: 1}\nfiles: a\npart: 2/3\nonly: [p]\n")
    expected = Outer(Inner(5, False), Path("o"), (Path("a"),), (0.5, 0.1), {"x": 1}, (2, 3), ("p",))
    assert parse("do", Outer, ["--config", str(file), "--batch", "5"]) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("bach: 2", "unknown option bach; did you mean batch?"),
        ("hidden: 2", "unknown option hidden"),
        ("batch: 0", "--batch must be at least 1, not 0"),
        ("batch: many", "--batch must be a whole number, not 'many'"),
        ("flip: maybe", "--no-flip must be true or false, not 'maybe'"),
        ("- batch", "must hold options"),
        ("a: b: c", "is no YAML"),
    ],
)
def test_mistakes_in_a_file_of_options(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        parse("do", Outer, ["--out", "o", "--config", str(file)])


def test_help_tells_defaults_and_what_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse("do", Outer, ["--help"])
    said = " ".join(capsys.readouterr().out.split())
    for text in (
        "Do it; slowly.",
        "--batch N images (default: 8)",
        "--no-flip do not mirror",
        "--part N this one (default: 1/1)",
    ):
        assert text in said
    assert "--out PATH where it goes (required)" in said
    assert "hidden" not in said


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there_and_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    job, run = COMMANDS[name]
    with pytest.raises(SystemExit, match="0"):
        main([*name.split(), "--help"])
    assert "--config FILE" in capsys.readouterr().out
    for place in (job, run):
        module, attribute = place.split(":")
        assert callable(getattr(importlib.import_module(f"ttac.{module}"), attribute))
    assert main(["--help"]) == 0
    assert f"  {name} " in capsys.readouterr().out


def test_the_demo_gets_what_was_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = []
    module = type(sys)("ttac.benchmark.demo")
    module.run_demo = lambda job, console: calls.append((job.out, job.seed, job.cache))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ttac.benchmark.demo", module)
    assert main(["demo"]) == 0
    assert main(["demo", "--out", str(tmp_path), "--seed", "3", "--cache", "c"]) == 0
    assert calls == [(Path("out/demo"), 0, user_cache()), (tmp_path, 3, Path("c"))]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [("--help", 0), ("--version", 0), ("serve --help", 0), ("stats --help", 0), ("demo --seed x", 2)],
)
def test_help_and_mistakes_do_not_wait_for_torch(arguments: str, code: int) -> None:
    script = (
        "import json, sys, ttac.cli\n"
        "try: sys.exit(ttac.cli.main(sys.argv[1:]))\n"
        "except SystemExit as stop: print(json.dumps([stop.code, sorted(sys.modules)]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", script, *arguments.split()]
    ended = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    exit_code, modules = json.loads(ended.stdout.splitlines()[-1])
    assert exit_code == code
    # The overview imports what every command takes.
    assert not {"torch", "numpy", "timm", "torchvision", "PIL", "rich"} & set(modules)
    if arguments == "--version":
        assert ended.stdout.splitlines()[0] == f"ttac {__version__}"
