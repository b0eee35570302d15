"""Where commands write to: what is told before the work begins, and what becomes of a disk that takes no more."""

from __future__ import annotations

import errno
import importlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import ttac.benchmark.job
import ttac.cli
from bench_helpers import InlineExecutor, write_experiment
from ttac.benchmark import demo
from ttac.cli import COMMANDS, UNWRITABLE, main
from ttac.cli.parsing import options_of
from ttac.common import files
from ttac.evaluation.engine import evaluate
from ttac.methods.registry import adapt
from ttac.model.classifier import Classifier
from ttac.model.networks import ResNet
from ttac.model.weights import ModelDescription, save_model

FAST = ["--set", "window=4", "--batch", "4"]
OUT = {  # by command: the option of its output, and the words that it needs beside
    "adapt": ("--out", "--model {world}/model.safetensors --images {world}/images --checkpoint-every 0"),
    "evaluate": ("--out", "--model {world}/model.safetensors --data {world}/arrays --prefetch 0"),
    "train": ("--out", "--data {world}/arrays --arch resnet8 --val 0 --epochs 1 --batch 4 --set width=4"),
    "corrupt": ("--out", "--data {world}/arrays --corruptions contrast"),
    "attack": ("--out", "--model {world}/model.safetensors --data {world}/arrays --steps 1"),
    "stats infer": ("--out", "--model {world}/model.safetensors"),
    "stats collect": ("--out", "--model {world}/model.safetensors --images {world}/images"),
    "bench": ("--out", "{world}/small.yaml --only *-test-contrast-* --cache {world}/cache"),
    "report": ("--out", "{world}/results"),
    "demo": ("--cache", "--out {world}/report"),
}
FILES = ("evaluate", "stats infer", "stats collect")
ADAPTING = ("adapt", "evaluate")
UNFINISHED = ("progress.pt", "predictions.csv.part")  # names that say so


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a few images as files and as arrays, an experiment, and its results."""
    folder = tmp_path_factory.mktemp("world")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save_model(
            folder / "model.safetensors",
            ResNet(8, 2, width=4),
            ModelDescription("resnet8", 2, mean=(0.0,) * 3, std=(1.0,) * 3, size=(32, 32)),
        )
    pixels = np.random.default_rng(0).integers(0, 256, (8, 32, 32, 3), np.uint8)
    for name in ("images/0", "images/1", "arrays"):
        (folder / name).mkdir(parents=True)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"images/{number % 2}/{number}.png")
    np.save(folder / "arrays/images.npy", pixels)
    np.save(folder / "arrays/labels.npy", np.arange(8) % 2)
    write_experiment(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ttac.benchmark.job, "LocalProcesses", InlineExecutor)
        words = ["bench", f"{folder}/small.yaml", "--only", "*-test-contrast-*", "--cache", f"{folder}/cache"]
        assert main([*words, "--out", f"{folder}/results"]) == 0
    return folder


def words(name: str, out: Path, world: Path) -> list[str]:
    option, others = OUT[name]
    more = [*FAST, "--method", "tent"] if name in ADAPTING else []
    return [*name.split(), *(word.format(world=world) for word in others.split()), option, str(out), *more]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the commands that take long take none."""
    monkeypatch.setattr(ttac.benchmark.job, "LocalProcesses", InlineExecutor)
    monkeypatch.setattr(demo, "EPOCHS", 1)
    monkeypatch.setattr(demo, "CONTENDERS", demo.CONTENDERS[:1])
    monkeypatch.setattr(demo, "SHIFTS", {"fog": demo.SHIFTS["fog"]})
    digits = demo.load_digits("train", 0)
    monkeypatch.setattr(demo, "load_digits", lambda split, seed: tuple(part[:128] for part in digits))


def results(place: Path) -> dict[Path, bytes]:
    """Read the files that are there under the names of results."""
    found = (path for path in place.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {path: path.read_bytes() for path in found if path.name not in UNFINISHED}


def test_every_output_of_a_command_is_declared() -> None:
    found = {}
    for name, (job, _) in COMMANDS.items():
        module, kind = job.split(":")
        options = options_of(getattr(importlib.import_module(f"ttac.{module}"), kind))
        found[name] = {one.name for one in options if "output" in one.field.metadata}
    assert found == {
        **{name: {"out"} for name in ("train", "adapt", "evaluate", "replay", "stats collect", "stats infer")},
        **{name: {"out"} for name in ("corrupt", "attack", "report")},
        **{name: {"out", "cache"} for name in ("bench", "demo")},
        **{name: set() for name in ("data list", "data check", "methods")},
        "serve": {"state"},
        "data fetch": {"root"},
    }  # fmt: skip


@pytest.mark.parametrize("name", [*OUT, "serve", "replay", "data fetch"])
def test_a_wrong_output_is_told_before_anything_is_read(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("precious")
    option, others = {
        "serve": ("--state", "--model nowhere.pt"),
        "replay": ("--out", "--url http://127.0.0.1:1"),
        "data fetch": ("--root", "cifar10"),
        **OUT,
    }[name]
    command = [*name.split(), *others.split(), option]  # whose {world} is nowhere
    wrong = {"file/below": f"cannot be made: {tmp_path}/file is no folder"}
    if name in (*FILES, "replay"):
        (tmp_path / "folder").mkdir()
        wrong["folder"] = "is a folder; name a file"
    else:
        wrong["file"] = "is a file; name a folder"
    before = sorted(tmp_path.rglob("*"))
    for place, message in wrong.items():
        assert main([*command, f"{tmp_path}/{place}"]) == 2
        assert capsys.readouterr().err == f"error: {option} {tmp_path}/{place} {message}\n"
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "file").read_text() == "precious"


def test_a_list_of_runs_needs_no_place_to_write_to(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main([*words("bench", tmp_path / "file/below", world), "--dry-run"]) == 0


@pytest.mark.parametrize("name", OUT)
@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, "the disk is full: make space, and run the same command again"),
        (errno.EDQUOT, "your share of the disk is full: make space"),
        (errno.EROFS, "the disk is read-only: choose another place"),
        (errno.EACCES, "permission is denied: choose another place"),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_disk_that_fails_at_work_is_one_line(
    name: str, number: int, reason: str, world: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def failing(_: Path) -> None:
        raise OSError(number, "as the system says it")

    monkeypatch.setattr(files, "to_disk", failing)
    assert main(words(name, tmp_path / "out", world)) == UNWRITABLE
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert f" cannot be written, {reason}" in said
    assert said.count("\n") == 1
    assert not results(tmp_path)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a disk of a size, or change what is mounted."""
    place, mounted = tmp_path / "disk", []

    def mount(options: str) -> Path:
        again = ["-o", f"remount,{options}", place] if mounted else ["-t", "tmpfs", "-o", options, "tmpfs", place]
        place.mkdir(exist_ok=True)
        if subprocess.run(["mount", *again], capture_output=True, check=False).returncode:
            pytest.skip("this user may not mount a small disk")
        mounted.append(options)
        return place

    yield mount
    if mounted:
        subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize("name", OUT)
@pytest.mark.usefixtures("here")
def test_a_small_disk_fills_up_and_the_same_command_goes_on(
    name: str, world: Path, disk: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    place = disk("size=16k")
    (place / "others").write_bytes(bytes(2**14 if name in (*FILES, "bench") else 2**12))
    command = words(name, place / "out", world)
    with monkeypatch.context() as patched:  # as it is where others fill it while the command is at work
        patched.setattr(ttac.cli, "check_outputs", lambda job: None)
        patched.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**40, 0, 2**40))
        assert main(command) == UNWRITABLE
    there = results(place)
    said = capsys.readouterr().err
    assert "the disk is full: make space, and run the same command again" in said
    assert said.count("\n") == 1
    disk("size=4m")
    assert main(command) == 0
    whole = results(place)
    assert len(whole) > len(there)
    assert {path: whole[path] for path in there} == there


@pytest.mark.parametrize("name", ["adapt", "train", "report", "corrupt", "attack"])
def test_what_is_known_to_be_written_has_to_have_space(
    name: str, world: Path, disk: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    place = disk("size=8k")
    assert main(words(name, place / "out", world)) == UNWRITABLE
    assert "MiB are free: make space, or take another folder" in capsys.readouterr().err
    assert not results(place)


@pytest.mark.parametrize("name", OUT)
def test_disks_that_are_full_or_read_only_are_told_before_anything_is_read(
    name: str, disk: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    place = disk("size=4k")
    (place / "ballast").write_bytes(bytes(4096))
    option, others = OUT[name]
    command = [*name.split(), *others.split(), option, f"{place}/new/out"]
    assert main(command) == UNWRITABLE
    where = f"error: {option} {place}/new/out cannot be written, the disk is"
    assert capsys.readouterr().err == f"{where} full: make space, and run the same command again\n"
    disk("ro")
    assert main(command) == UNWRITABLE
    assert capsys.readouterr().err == f"{where} read-only: choose another place\n"
    assert [path.name for path in place.iterdir()] == ["ballast"]


def test_a_record_that_python_saves_says_where(tiny_classifier: Classifier, disk: Callable[[str], Path]) -> None:
    record = evaluate(adapt(tiny_classifier, "test"), [(torch.rand(2, 3, 8, 8), torch.tensor([0, 1]))], "N-O-SF")
    place = disk("size=4k")
    (place / "ballast").write_bytes(bytes(4096))
    with pytest.raises(files.DiskError, match=r"record.json cannot be written, the disk is full") as told:
        record.save(place / "record.json")
    assert isinstance(told.value.__cause__, OSError)
    assert [path.name for path in place.iterdir()] == ["ballast"]
