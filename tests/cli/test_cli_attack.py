"""`ttac attack`: what it writes and says, the same bytes after any interruption, and the message for every mistake."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from data_helpers import read_data
from job_helpers import assert_refused, contents, run_until_killed
from ttac.cli import main
from ttac.evaluation import attack_job
from ttac.model.networks import ResNet
from ttac.source.loading import ModelDescription, load_model, save_model

COUNT, CLASSES = 10, ("ant", "bee", "cat", "dog")


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """A folder with a model and images, all but two of which it takes for what they are."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = ResNet(8, len(CLASSES), width=4).eval()
    images = np.random.default_rng(0).integers(0, 256, (COUNT, 16, 16, 3), np.uint8)
    with torch.no_grad():  # without a class that an untrained network prefers
        network.fc.bias -= network(torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255).mean(0)
    save_model(
        tmp_path / "model.safetensors", network, ModelDescription("resnet8", 4, size=(16, 16), mean=(0.0,), std=(1.0,))
    )
    labels = predictions(tmp_path, images)
    labels[[2, 7]] = (labels[[2, 7]] + 1) % 4
    np.save(tmp_path / "images.npy", images)
    np.save(tmp_path / "labels.npy", labels)
    return tmp_path


def predictions(world: Path, images: np.ndarray) -> np.ndarray:
    classifier = load_model(f"{world}/model.safetensors").classifier
    with torch.no_grad():
        return classifier(torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255).argmax(1).numpy()


def command(world: Path, out: str, *more: str) -> list[str]:
    given = {"--model": f"{world}/model.safetensors", "--data": str(world), "--batch": "3", "--steps": "3"}
    given.update(zip(more[::2], more[1::2], strict=True))
    return ["attack", "--out", f"{world}/{out}", *(word for pair in given.items() for word in pair)]


def record_of(folder: Path) -> dict[str, object]:
    record = json.loads((folder / "record.json").read_text())
    for name in ("seconds", "continued_at", "environment"):
        del record[name]
    return record


def same_results(first: Path, second: Path) -> bool:
    names = ("images.npy", "labels.npy")
    arrays = all((first / name).read_bytes() == (second / name).read_bytes() for name in names)
    return arrays and contents(first).keys() == contents(second).keys() and record_of(first) == record_of(second)


def at_call(place: int, action: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something in the middle of a batch."""
    attack, calls = attack_job.pgd, iter(range(1, 10**6))

    def attacking(*given: object) -> Tensor:
        changed = attack(*given)
        if next(calls) == place:
            action()
        return changed

    monkeypatch.setattr(attack_job, "pgd", attacking)


@pytest.mark.parametrize(
    ("norm", "eps", "largest"), [("linf", "8/255", 8 / 255), ("linf", "0.1", 0.1), ("l2", "1.5", 1.5)]
)
def test_a_whole_run(norm: str, eps: str, largest: float, world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(world, "out", "--norm", norm, "--eps", eps, "--step", "1/20", "--steps", "8")) == 0
    said = capsys.readouterr().out
    out = world / "out"
    assert {path.name for path in out.iterdir()} == {"images.npy", "labels.npy", "record.json"}
    clean, labels = np.load(world / "images.npy"), np.load(world / "labels.npy")
    images = np.load(out / "images.npy", mmap_mode="r")
    assert (images.dtype, images.shape) == (np.uint8, clean.shape)
    assert np.array_equal(np.load(out / "labels.npy"), labels)
    moved = (images.astype(float) - clean).reshape(COUNT, -1) / 255
    sizes = np.abs(moved).max(1) if norm == "linf" else np.linalg.norm(moved, axis=1)
    assert sizes.max() <= largest + 1e-9
    assert sizes.min() > 0.4 * largest

    right, after = predictions(world, clean) == labels, predictions(world, np.array(images)) == labels
    record = json.loads((out / "record.json").read_text())
    assert record["clean_error"] == 100 * np.mean(~right)
    assert record["adversarial_error"] == 100 * np.mean(~after)
    assert record["success_rate"] == pytest.approx(100 * np.sum(right & ~after) / np.sum(right))
    assert record["success_rate"] > 20
    assert record["settings"]["model"] == load_model(f"{world}/model.safetensors").classifier.fingerprint()
    assert record["settings"]["data"] == read_data(str(world)).fingerprint
    assert record["settings"]["eps"] == pytest.approx(largest)
    assert (record["images"], record["continued_at"], record["seconds"] > 0) == (COUNT, 0, True)
    assert f"{np.sum(right & ~after)} of {np.sum(right)} deceived" in said
    assert f"error {record['clean_error']:.2f} % before and {record['adversarial_error']:.2f} % after" in said
    assert f"success rate {record['success_rate']:.2f} %" in said


def test_what_is_written_is_read_as_a_data_set(world: Path) -> None:
    assert main(command(world, "out")) == 0
    data = read_data(f"{world}/out", split="test")
    assert torch.equal(data.labels, torch.from_numpy(np.load(world / "labels.npy")).long())
    pixels = data.read(torch.tensor([4, 1])).permute(0, 2, 3, 1).numpy()
    assert np.array_equal(pixels, np.load(world / "out/images.npy")[[4, 1]])


def test_the_usual_numbers_are_the_default(world: Path) -> None:
    for norm, eps, step in (("linf", 8 / 255, 0.01), ("l2", 0.5, 0.1)):
        words = command(world, norm, "--norm", norm, "--samples", "1")
        del words[words.index("--steps") : words.index("--steps") + 2]
        assert main(words) == 0
        settings = json.loads((world / norm / "record.json").read_text())["settings"]
        assert (settings["eps"], settings["step"], settings["steps"]) == (eps, step, 40)
        assert settings["random_start"] is True


def test_labels_follow_the_models_classes(world: Path) -> None:
    network = load_model(f"{world}/model.safetensors").classifier.model
    backwards = CLASSES[::-1]
    save_model(
        world / "named.safetensors",
        network,
        ModelDescription("resnet8", 4, size=(16, 16), classes=backwards, mean=(0.0,), std=(1.0,)),
    )
    for name in CLASSES[1:]:
        (world / "folder" / name).mkdir(parents=True)
        Image.fromarray(np.full((16, 16, 3), 100, np.uint8)).save(world / "folder" / name / "1.png")
    changes = "--data", f"{world}/folder", "--model", f"{world}/named.safetensors"
    assert main(command(world, "out", *changes)) == 0
    assert np.load(world / "out/labels.npy").tolist() == [backwards.index(name) for name in CLASSES[1:]]


def test_signals_end_the_batch_and_the_same_command_goes_on(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(world, "whole")) == 0
    for signum in (signal.SIGINT, signal.SIGTERM):
        with monkeypatch.context() as patched:
            at_call(1, partial(signal.raise_signal, signum), patched)
            assert main(command(world, "parts")) == 128 + signum
    said = capsys.readouterr()
    assert "stopped after 6 of 10 images of images.npy; the same command goes on from there" in said.err
    assert "going on after 3 images" in said.out
    assert not (world / "parts/images.npy").exists()
    assert main(command(world, "parts")) == 0
    assert same_results(world / "parts", world / "whole")
    assert json.loads((world / "parts/record.json").read_text())["continued_at"] == 6


def test_a_killed_process_goes_on_bit_for_bit(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(world, "whole")) == 0
    preparation = (
        "from ttac.data import array_file\n"
        "from ttac.evaluation import attack_job\n"
        "array_file.SYNC_SECONDS = 0\n"
        "attack, calls = attack_job.pgd, iter(range(99))\n"
        "def attacking(*given):\n"
        "    if next(calls) == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return attack(*given)\n"
        "attack_job.pgd = attacking\n"
    )
    run_until_killed(preparation, command(world, "parts"))
    assert not (world / "parts/images.npy").exists()
    assert main(command(world, "parts")) == 0
    assert "going on after 6 images" in capsys.readouterr().out
    assert same_results(world / "parts", world / "whole")


@pytest.mark.parametrize("name", ["images.npy", "record.json"])
def test_a_death_while_results_are_written_is_mended(name: str, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(command(world, "whole")) == 0
    replace = Path.replace

    def dies(self: Path, target: Path) -> Path:
        if Path(target).name == name:
            raise KeyboardInterrupt
        return replace(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", dies)
        assert main(command(world, "parts")) == 130
    with monkeypatch.context() as patched:
        at_call(1, lambda: pytest.fail("it was attacked again"), patched)
        assert main(command(world, "parts")) == 0
    assert same_results(world / "parts", world / "whole")


def test_a_complete_folder_is_left_alone_and_other_settings_are_refused(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(world, "out")) == 0
    before = contents(world / "out")
    at_call(1, lambda: pytest.fail("it was attacked again"), monkeypatch)
    assert main(command(world, "out")) == 0
    assert "is complete: nothing to do" in capsys.readouterr().out
    for more, message in (
        (("--eps", "4/255"), "eps: 0.03137254901960784 there, 0.01568627450980392 now"),
        (("--steps", "4"), "steps: 3 there, 4 now"),
        (("--batch", "4"), "batch: 3 there, 4 now"),
        (("--samples", "9"), "images: 10 there, 9 now"),
        (("--mean", "0.5"), "model: "),
    ):
        refusal = f"{world}/out is of another run ({message}"
        assert_refused(command(world, "out", *more), world / "out", refusal, capsys)
    assert contents(world / "out") == before


def test_hidden_rows_of_other_settings_are_not_gone_on_with(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patched:
        at_call(2, partial(signal.raise_signal, signal.SIGTERM), patched)
        assert main(command(world, "out")) == 128 + signal.SIGTERM
    for path in (world / "out").glob("[!.]*"):  # as `rm out/*` does
        path.unlink()
    assert (world / "out/.images.npy.part").exists()
    capsys.readouterr()
    assert main(command(world, "out", "--seed", "1")) == 0
    assert "going on" not in capsys.readouterr().out
    assert main(command(world, "whole", "--seed", "1")) == 0
    assert same_results(world / "out", world / "whole")


@pytest.mark.parametrize("name", ["images.npy", "labels.npy"])
def test_a_record_does_not_hide_what_is_missing_or_damaged(
    name: str, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(world, "out")) == 0
    assert main(command(world, "whole")) == 0
    damaged = world / "out" / name
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert_refused(command(world, "out"), world / "out", "delete it, and the same command writes it again", capsys)
    assert_refused(command(world, "out"), world / "out", f"{damaged} ", capsys)
    damaged.unlink()
    assert main(command(world, "out")) == 0
    assert "nothing to do" not in capsys.readouterr().out
    assert same_results(world / "out", world / "whole")


def test_another_order_of_classes_is_another_run(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    network, digits = ResNet(8, 10, channels=1, width=4), tuple(map(str, range(10)))
    for file, names in (("a", digits), ("b", digits[::-1])):
        described = ModelDescription(
            "resnet8", 10, 1, size=(32, 32), classes=names, arch_options={"width": 4}, mean=(0.0,), std=(1.0,)
        )
        save_model(world / f"{file}.safetensors", network, described)
    given = "--data", "digits", "--samples", "2", "--steps", "1"
    assert main(command(world, "out", *given, "--model", f"{world}/a.safetensors")) == 0
    backwards = command(world, "out", *given, "--model", f"{world}/b.safetensors")
    assert_refused(backwards, world / "out", f"{world}/out is of another run (labels: ", capsys)


def test_results_of_something_else_are_not_overwritten(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = "holds images.npy, labels.npy of something else: choose another --out"
    assert_refused(command(world, "."), world, message, capsys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--model", "{world}/nowhere.pt"), "no model file"),
        (("--data", "{world}/nowhere"), "no folder"),
        (("--data", "{world}/grey"), "the images have 1 channels, the model takes 3"),
        (("--data", "{world}/many"), "the data have 5 classes, the model has 4"),
        (("--eps", "eight"), "--eps"),
        (("--eps", "1/0"), "--eps"),
        (("--eps", "0"), "--eps"),
        (("--eps", "0.5/255"), "eps 0.00196 is less than one level of 8-bit images"),
        (("--step", "-1"), "--step"),
        (("--samples", "11"), "11 images are wanted, and there are 10"),
    ],
)
def test_mistakes_have_a_message_and_write_nothing(
    change: tuple[str, str], message: str, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, channels, label in (("grey", 1, 0), ("many", 3, 4)):
        (world / folder).mkdir()
        np.save(world / folder / "images.npy", np.zeros((2, 16, 16, channels), np.uint8))
        np.save(world / folder / "labels.npy", np.full(2, label, np.uint8))
    assert_refused(command(world, "out", change[0], change[1].format(world=world)), world / "out", message, capsys)


def test_a_model_that_was_never_right_has_no_success_rate(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = (predictions(world, np.load(world / "images.npy")) + 1) % 4
    np.save(world / "labels.npy", labels)
    assert main(command(world, "out")) == 0
    assert "success rate unknown, none was right before" in capsys.readouterr().out
    assert record_of(world / "out")["success_rate"] is None
