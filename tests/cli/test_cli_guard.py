"""The guard of `ttac adapt`, which is on, and of `ttac evaluate`, which has to be asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapt_helpers import RESULTS, command, interrupt_at, make_world

from ttac.cli import main
from ttac.evaluation.records import Record
from ttac.source.loading import load_model

WILD = ("--method", "tent", "--set", "lr=1000")


@pytest.fixture
def world(tmp_path: Path) -> Path:
    return make_world(tmp_path)


def tent(world: Path, out: str, *more: str, guard: bool = True) -> list[str]:
    """Adapt by TENT, which has no queue."""
    words = command(world, out, guard=guard)
    return [*words[: words.index("--set")], "--set", "window=8", *WILD, "--checkpoint-every", "0", *more]


def fingerprint(file: Path) -> str:
    return load_model(str(file)).classifier.fingerprint()


def test_a_collapse_is_undone_unless_the_guard_is_switched_off(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(tent(world, "guarded")) == 0
    said = capsys.readouterr().out
    assert "41 images predicted, 5 updates, 2 unreadable; the guard undid 2 updates and kept 0 images" in said
    assert "(after 41 images, reset: " in said
    assert fingerprint(world / "guarded/adapted.safetensors") == fingerprint(world / "model.safetensors")
    record = Record.load(world / "guarded/record.json")
    assert (record.guard["guard_refusals"], record.guard["resets"]) == (2, 2)
    assert [event["samples"] for event in record.guard["events"]] == [33, 41], "once 32 images are there to compare on"
    assert record.provenance["settings"]["guard"] is True

    assert main(tent(world, "wild", guard=False)) == 0
    assert "guard" not in capsys.readouterr().out
    assert fingerprint(world / "wild/adapted.safetensors") != fingerprint(world / "model.safetensors")
    assert Record.load(world / "wild/record.json").guard == {}


def test_a_guarded_stream_goes_on_after_a_crash_wherever_it_comes(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash() -> None:
        raise KeyboardInterrupt

    assert main(tent(world, "whole")) == 0
    for call in (2, 6):  # before the first refusal, and between the two
        with monkeypatch.context() as patched:
            interrupt_at(call, crash, patched)
            assert main(tent(world, "parts")) == 130
    assert main(tent(world, "parts")) == 0
    for name in RESULTS:
        assert (world / "parts" / name).read_bytes() == (world / "whole" / name).read_bytes(), name
    whole, parts = (Record.load(world / name / "record.json") for name in ("whole", "parts"))
    assert (parts.guard, parts.counters) == (whole.guard, whole.counters)


def test_a_folder_begun_with_a_guard_is_not_gone_on_with_without_one(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(tent(world, "out")) == 0
    assert main(tent(world, "out", guard=False)) == 2
    assert "is of another run (guard: True there, None now)" in capsys.readouterr().err


def test_a_method_that_cannot_be_guarded_says_so(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = command(world, "out", guard=True)
    assert main([*words[: words.index("--set")], "--method", "t3a", "--set", "window=8"]) == 0
    assert "no guard: t3a has confidences of its own" in capsys.readouterr().out
    assert Record.load(world / "out/record.json").guard == {}


def test_evaluate_guards_when_asked(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for label in ("a", "b", "c", "d"):
        (world / "data" / label).mkdir(parents=True)
    for number, file in enumerate(sorted((world / "images").glob("*.png"))):
        if file.read_bytes()[:3] != b"no ":
            (world / "data" / "abcd"[number % 4] / file.name).write_bytes(file.read_bytes())
    (world / "classes.txt").write_text("a\nb\nc\nd\n")
    words = [
        "evaluate", "--model", f"{world}/model.safetensors", "--classes", f"{world}/classes.txt", "--data",
        f"{world}/data", "--batch", "5", "--set", "window=8", *WILD,
    ]  # fmt: skip
    assert main([*words, "--out", f"{world}/plain.json"]) == 0
    assert main([*words, "--out", f"{world}/guarded.json", "--guard"]) == 0
    plain, guarded = (Record.load(world / f"{name}.json") for name in ("plain", "guarded"))
    assert plain.guard == {}
    assert plain.provenance["settings"]["guard"] is None
    assert guarded.guard["guard_refusals"] == 2
    assert "; the guard undid 2 updates" in capsys.readouterr().out
    assert main([*words, "--out", f"{world}/plain.json", "--guard"]) == 2
    assert "guard: None there, True now" in capsys.readouterr().err
