"""`ttac corrupt`: the public layout, the same bytes after any interruption, and the message for every mistake."""

from __future__ import annotations

import io
import json
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from data_helpers import read_data
from job_helpers import assert_refused, contents, run_until_killed
from ttac.cli import UNWRITABLE, main
from ttac.data import array_file
from ttac.data.corruptions import CORRUPTIONS, Corruption

COUNT, BATCH = 8, 3
NAMES = ("gaussian_noise", "contrast")


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """A folder with arrays of a few images."""
    random = np.random.default_rng(0)
    for split, count in (("train", 4), ("test", COUNT)):
        np.save(tmp_path / f"{split}_images.npy", random.integers(0, 256, (count, 32, 32, 3), np.uint8))
        np.save(tmp_path / f"{split}_labels.npy", np.arange(count) % 3)
    return tmp_path


def command(world: Path, out: str, *more: str) -> list[str]:
    given = {"--data": str(world), "--batch": str(BATCH), "--corruptions": " ".join(NAMES)}
    given.update(zip(more[::2], more[1::2], strict=True))
    words = [word for name, value in given.items() for word in (name, *value.split())]
    return ["corrupt", "--out", f"{world}/{out}", *words]


def arrays(folder: Path) -> dict[str, bytes]:
    return {name: content for name, content in contents(folder).items() if name.endswith(".npy")}


def at_call(number: int, action: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something in the middle of a batch."""
    apply, calls = Corruption.__call__, iter(range(1, 10**6))

    def applying(self: Corruption, images: Tensor, index: Tensor) -> Tensor:
        result = apply(self, images, index)
        if len(index) > 1 and next(calls) == number:  # one image alone is a trial
            action()
        return result

    monkeypatch.setattr(Corruption, "__call__", applying)


def test_the_public_layout_row_by_row(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(world, "out")) == 0
    out = world / "out"
    assert {path.name for path in out.iterdir()} == {"labels.npy", "record.json", *(f"{name}.npy" for name in NAMES)}
    clean = torch.from_numpy(np.load(world / "test_images.npy")).permute(0, 3, 1, 2)
    labels = np.load(out / "labels.npy")
    assert (labels.dtype, labels.tolist()) == (np.uint8, [row % COUNT % 3 for row in range(5 * COUNT)])
    for name in NAMES:
        images = np.load(out / f"{name}.npy", mmap_mode="r")
        assert (images.dtype, images.shape) == (np.uint8, (5 * COUNT, 32, 32, 3))
        for row in range(5 * COUNT):
            severity, sample = row // COUNT + 1, row % COUNT
            expected = Corruption(name, severity)(clean[sample][None], torch.tensor([sample]))
            assert np.array_equal(images[row], expected[0].permute(1, 2, 0).numpy()), (name, row)
    said = capsys.readouterr().out
    assert f"{10 * COUNT} images written to 2 files" in said
    assert "images a second" in said


def test_what_is_written_is_read_as_a_data_set(world: Path) -> None:
    assert main(command(world, "out")) == 0
    data = read_data(f"{world}/out", split="test", domain="contrast", severity=2)
    assert (len(data), data.size, data.channels) == (COUNT, (32, 32), 3)
    assert torch.equal(data.labels, torch.arange(COUNT) % 3)
    clean = read_data(str(world), split="test")
    rows = torch.arange(COUNT)
    assert torch.equal(data.read(rows), Corruption("contrast", 2)(clean.read(rows), rows))


def test_the_record_says_what_produced_it(world: Path) -> None:
    assert main(command(world, "out", "--seed", "3", "--samples", "5")) == 0
    record = json.loads((world / "out/record.json").read_text())
    assert record["format"] == "ttac.corruptions/1"
    assert (record["files"], record["images"], record["severities"]) == (
        ["gaussian_noise.npy", "contrast.npy"],
        5,
        [1, 2, 3, 4, 5],
    )
    assert record["settings"] == {
        "data": read_data(str(world), split="test").some(5).fingerprint,
        "images": 5,
        "size": [32, 32],
        "seed": 3,
        "constants": 32,
        "frost": "procedural texture",
        "device": "cpu",
    }
    assert "ttac" in record["environment"]


def test_batches_do_not_matter(world: Path) -> None:
    assert main(command(world, "a")) == 0
    assert main(command(world, "b", "--batch", "500")) == 0
    assert arrays(world / "a") == arrays(world / "b")


def test_signals_end_the_batch_and_the_same_command_goes_on(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(world, "whole")) == 0
    for signum in (signal.SIGINT, signal.SIGTERM):
        with monkeypatch.context() as patched:
            at_call(5, partial(signal.raise_signal, signum), patched)
            assert main(command(world, "parts")) == 128 + signum
    said = capsys.readouterr()
    assert "stopped after 27 of 40 images of gaussian_noise.npy; the same command goes on from there" in said.err
    assert "going on after 14 images" in said.out
    assert sorted(arrays(world / "parts")) == ["labels.npy"]
    assert main(command(world, "parts")) == 0
    assert arrays(world / "parts") == arrays(world / "whole")
    assert contents(world / "parts").keys() == contents(world / "whole").keys()


def test_a_killed_process_goes_on_bit_for_bit(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(world, "whole")) == 0
    preparation = (
        "from ttac.data import array_file\n"
        "array_file.SYNC_SECONDS = 0\n"
        "write, calls = array_file._write, iter(range(99))\n"
        "def writing(file, content):\n"
        "    if next(calls) == 23:\n"
        "        write(file, content[:5000])\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    write(file, content)\n"
        "array_file._write = writing\n"
    )
    run_until_killed(preparation, command(world, "parts"))
    assert sorted(arrays(world / "parts")) == ["gaussian_noise.npy", "labels.npy"]
    assert (world / "parts/.contrast.npy.rows").read_text().split()[0] == "16"
    assert main(command(world, "parts")) == 0
    assert "going on after 56 images" in capsys.readouterr().out
    assert arrays(world / "parts") == arrays(world / "whole")
    assert contents(world / "parts").keys() == contents(world / "whole").keys()


def test_whole_files_are_not_made_again_and_others_are_added(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(world, "out", "--corruptions", "contrast")) == 0
    before = arrays(world / "out")
    made: list[str] = []
    apply = Corruption.__call__

    def applying(self: Corruption, images: Tensor, index: Tensor) -> Tensor:
        made.extend([self.name] * (len(index) > 1))
        return apply(self, images, index)

    monkeypatch.setattr(Corruption, "__call__", applying)
    assert main(command(world, "out", "--corruptions", "contrast")) == 0
    assert "is complete: nothing to do" in capsys.readouterr().out
    assert not made
    assert main(command(world, "out")) == 0
    assert set(made) == {"gaussian_noise"}
    after = arrays(world / "out")
    assert {name: after[name] for name in before} == before
    assert json.loads((world / "out/record.json").read_text())["files"] == ["gaussian_noise.npy", "contrast.npy"]
    (world / "out/contrast.npy").unlink()
    assert main(command(world, "out")) == 0
    assert arrays(world / "out") == after


@pytest.mark.parametrize("calls", [2, 10**5])
def test_other_settings_are_refused_and_nothing_changes(
    calls: int, world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patched:
        at_call(calls, lambda: signal.raise_signal(signal.SIGINT), patched)
        main(command(world, "out"))
    assert (world / "out/record.json").exists() == (calls > 2)
    for name, value, message in (
        ("--seed", "1", "seed: 0 there, 1 now"),
        ("--samples", "6", "images: 8 there, 6 now"),
        ("--split", "train", "images: 8 there"),
    ):
        refusal = f"{world}/out is of another run ({message}"
        assert_refused(command(world, "out", name, value), world / "out", refusal, capsys)


def test_hidden_rows_of_other_settings_are_not_gone_on_with(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patched:
        at_call(5, partial(signal.raise_signal, signal.SIGTERM), patched)
        assert main(command(world, "out")) == 128 + signal.SIGTERM
    for path in (world / "out").glob("[!.]*"):  # as `rm out/*` does
        path.unlink()
    assert (world / "out/.gaussian_noise.npy.part").exists()
    capsys.readouterr()
    assert main(command(world, "out", "--seed", "1")) == 0
    assert "going on" not in capsys.readouterr().out
    assert main(command(world, "whole", "--seed", "1")) == 0
    assert contents(world / "out").keys() == contents(world / "whole").keys()
    assert arrays(world / "out") == arrays(world / "whole")


@pytest.mark.parametrize("name", ["contrast.npy", "labels.npy"])
def test_a_record_does_not_hide_what_is_missing_or_damaged(
    name: str, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(world, "out")) == 0
    before, damaged = arrays(world / "out"), world / "out" / name
    damaged.write_bytes(before[name][:-1])
    again = command(world, "out", "--corruptions", "gaussian_noise")  # the record lists the other as well
    assert_refused(again, world / "out", "delete it, and the same command writes it again", capsys)
    assert_refused(again, world / "out", f"{damaged} ", capsys)
    damaged.unlink()
    assert main(again) == 0
    assert "nothing to do" not in capsys.readouterr().out
    assert arrays(world / "out") == before
    assert main(again) == 0
    assert "is complete: nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize("chosen", ["contrast", "fog"])
def test_files_that_the_record_does_not_list_are_not_adopted(
    chosen: str, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(world, "out", "--corruptions", "contrast")) == 0
    (world / "out/fog.npy").write_bytes((world / "out/contrast.npy").read_bytes())
    message = "holds fog.npy of something else: choose another --out"
    assert_refused(command(world, "out", "--corruptions", chosen), world / "out", message, capsys)
    (world / "out/fog.npy").unlink()
    record = world / "out/record.json"
    record.write_text(record.read_text().replace("contrast.npy", "../fog.npy"))
    message = "of something else: choose another --out"
    assert_refused(command(world, "out", "--corruptions", chosen), world / "out", message, capsys)


def test_what_an_interrupted_addition_has_written_is_kept(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(command(world, "whole")) == 0
    assert main(command(world, "out", "--corruptions", "contrast")) == 0
    more = "contrast brightness gaussian_noise"
    with monkeypatch.context() as patched:
        at_call(20, partial(signal.raise_signal, signal.SIGTERM), patched)
        assert main(command(world, "out", "--corruptions", more)) == 128 + signal.SIGTERM
    assert (world / "out/brightness.npy").exists()
    assert not (world / "out/gaussian_noise.npy").exists()
    assert main(command(world, "out", "--corruptions", "contrast")) == 0
    assert json.loads((world / "out/record.json").read_text())["files"] == ["brightness.npy", "contrast.npy"]
    assert main(command(world, "out", "--corruptions", more)) == 0
    there = arrays(world / "out")
    assert {name: there[name] for name in arrays(world / "whole")} == arrays(world / "whole")
    assert not (world / "out/progress.pt").exists()


@pytest.mark.parametrize("name", ["fog.npy", "labels.npy", "record.json", "progress.pt"])
def test_results_of_something_else_are_not_overwritten(
    name: str, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (world / "out").mkdir()
    (world / "out" / name).write_text("precious")
    message = "is damaged, delete" if name == "progress.pt" else f"{name} of something else: choose another --out"
    assert_refused(command(world, "out"), world / "out", message, capsys)


def test_two_processes_do_not_share_a_folder(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = []
    with monkeypatch.context() as patched:
        at_call(2, lambda: codes.append(main(command(world, "out"))), patched)
        assert main(command(world, "out")) == 0
    assert codes == [2]
    assert "another process is writing to" in capsys.readouterr().err


def test_a_disk_that_fills_up(world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(world, "whole")) == 0
    write, calls = array_file._write, iter(range(99))

    def full(file: io.FileIO, content: bytes) -> None:
        if next(calls) == 4:
            write(file, content[:1000])
            raise OSError(28, "No space left on device")
        write(file, content)

    with monkeypatch.context() as patched:
        patched.setattr(array_file, "_write", full)
        assert main(command(world, "parts")) == UNWRITABLE
    assert "the disk is full" in capsys.readouterr().err
    assert main(command(world, "parts")) == 0
    assert "going on after 8 images" in capsys.readouterr().out
    assert arrays(world / "parts") == arrays(world / "whole")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--data", "{world}/nowhere"), "no folder"),
        (("--data", "{world}/empty"), "no image in"),
        (("--data", "{world}/small"), "too small to corrupt"),
        (("--data", "{world}/damaged"), "images.npy is not a readable array"),
        (("--corruptions", "rain"), "unknown corruption: 'rain'; "),
        (("--size", "64"), "is of 32 x 32: --size is for image files alone"),
        (("--samples", "9"), "9 images are wanted, and there are 8"),
        (("--device", "nowhere"), "device 'nowhere' cannot be used"),
        (("--frost", "{world}/nowhere"), "nowhere lacks frost1.png"),
        (("--split", "validation"), "has no validation images: choose train or test"),
    ],
)
def test_mistakes_have_a_message_and_write_nothing(
    change: tuple[str, str], message: str, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, side in (("small", 4), ("damaged", 32), ("empty", 0)):
        (world / folder).mkdir()
        if side:
            np.save(world / folder / "images.npy", np.zeros((2, side, side, 3), np.uint8))
            np.save(world / folder / "labels.npy", np.zeros(2, np.uint8))
    (world / "damaged/images.npy").write_bytes(b"\x93NUMPY")
    assert_refused(command(world, "out", change[0], change[1].format(world=world)), world / "out", message, capsys)


def test_an_out_that_is_a_file_is_refused(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (world / "out").write_text("precious")
    assert_refused(command(world, "out"), world / "out", "is a file; name a folder", capsys)
    assert (world / "out").read_text() == "precious"


def test_missing_space_is_said_before_anything_is_written(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 2**17})())
    assert_refused(command(world, "out"), world / "out", "needs 0.2 MiB more, and 0.1 MiB are free", capsys, UNWRITABLE)


def test_the_fifteen_are_the_default(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Corruption, "__call__", lambda self, images, index: images)
    assert main(["corrupt", "--data", str(world), "--out", f"{world}/out"]) == 0
    assert {path.stem for path in (world / "out").glob("*.npy")} == {*CORRUPTIONS, "labels"}
