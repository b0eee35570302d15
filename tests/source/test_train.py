"""`ttac train`: what is learned is the same however often it is interrupted, and every mistake has its message."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from ttac import Classifier, Record
from ttac.cli import main
from ttac.data.labelled import LabelledImages, from_tensors
from ttac.model.architectures import new_network
from ttac.model.views import apply_operations, random_crop, random_flip
from ttac.source.bundle import load_bundle
from ttac.source.loading import load_model
from ttac.source.objectives import CrossEntropy, SourceBatch, make_objective
from ttac.source.train import Recipe, Trainer, choose_precision, error_rate

COUNT = 40


def two_kinds(count: int = COUNT, side: int = 8) -> LabelledImages:
    """Images that are bright on the top or at the bottom."""
    images = 60 * torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(count) % 2
    images[labels == 0, :, : side // 2] += 150
    images[labels == 1, :, side // 2 :] += 150
    return from_tensors(images.byte(), labels, 2)


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """A folder with arrays to train on and to validate."""
    for split, count in (("train", COUNT), ("test", 10)):
        data = two_kinds(count)
        np.save(tmp_path / f"{split}_images.npy", data.read(torch.arange(count)).permute(0, 2, 3, 1).numpy())
        np.save(tmp_path / f"{split}_labels.npy", data.labels.numpy())
    return tmp_path


def command(world: Path, out: str, *more: str) -> list[str]:
    return [
        "train", "--data", str(world), "--arch", "resnet8", "--set", "width=4", "--objective", "ce+contrastive",
        "--epochs", "3", "--batch", "8", "--checkpoint-every", "0", "--out", f"{world}/{out}", *more,
    ]  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def interrupt_at(call: int, action: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something in the middle of a step."""
    step, calls = Trainer.step, iter(range(1, 10**6))

    def stepping(self: Trainer) -> None:
        step(self)
        if next(calls) == call:
            action()

    monkeypatch.setattr(Trainer, "step", stepping)


@pytest.mark.parametrize("name", ["ce", "ce+contrastive", "ce+rotation", "poly"])
def test_every_objective_learns_the_classes(name: str) -> None:
    objective, data = make_objective(name), two_kinds(64)
    torch.manual_seed(0)
    network = new_network("resnet8", 2, options={"width": 4})
    classifier = Classifier(network, mean=[0.5] * 3, std=[0.25] * 3, branch=objective.new_branch(16))
    trainer = Trainer(classifier, objective, data, Recipe(epochs=6, batch=16))
    losses = []
    while not trainer.finished:
        trainer.step()
        if trainer.at_epoch_end:
            losses.append(trainer.mean_loss())
    assert error_rate(classifier, data) < 5
    assert losses[-1] < losses[0]
    assert classifier.training


@pytest.mark.parametrize(
    ("precision", "strong"), [(None, 0.0), (None, 0.5), (torch.bfloat16, 0.0), (torch.float16, 0.0)]
)
def test_a_trainer_goes_on_from_its_state_wherever_that_was_taken(
    precision: torch.dtype | None, strong: float, tmp_path: Path
) -> None:
    recipe = Recipe(epochs=2, batch=8, strong=strong)

    def start() -> Trainer:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            layers = nn.Flatten(), nn.Linear(192, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)
            classifier = Classifier(nn.Sequential(*layers), head="4", mean=0, std=1)
        return Trainer(classifier, CrossEntropy(), two_kinds(), recipe, precision=precision)

    whole = start()
    while not whole.finished:
        whole.step()
    for place in (1, 5, 7):  # within an epoch, at its end, within the last
        first = start()
        for _ in range(place):
            first.step()
        torch.save(first.state_dict(), tmp_path / "state.pt")
        first.step()  # what comes after the state does not count
        torch.rand(3)  # nor does what others draw
        second = start()
        second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        while not second.finished:
            second.step()
        assert second.classifier.fingerprint() == whole.classifier.fingerprint()
        assert second.mean_loss() == whole.mean_loss()


@pytest.mark.parametrize(("share", "strong"), [(0.0, 0), (0.3, 2), (0.5, 4), (1.0, 8)])
def test_a_share_of_each_batch_is_under_strong_views(share: float, strong: int) -> None:
    data, seen = two_kinds(side=16), []

    @dataclass(frozen=True)
    class Watching(CrossEntropy):
        def losses(self, classifier: Classifier, batch: SourceBatch, generator: torch.Generator) -> dict[str, Tensor]:
            seen.append(batch)
            return super().losses(classifier, batch, generator)

    classifier = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 2)), mean=0, std=1)
    trainer = Trainer(classifier, Watching(), data, Recipe(epochs=1, batch=8, strong=share))
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(data), generator=generator)
    for step in range(3):
        trainer.step()
        images = data.read(order[8 * step : 8 * step + 8]).float() / 255
        expected = random_flip(random_crop(images, generator, padding=2), generator)
        if strong:
            drawn = torch.randint(14, (2, strong), generator=generator)
            signs = 1 - 2 * torch.randint(2, (2, strong), generator=generator)
            magnitudes = 3 * torch.randint(1, 10, (2, strong), generator=generator) * signs
            applied = torch.rand(2, strong, generator=generator) < 0.5
            for slot, row in product(range(2), range(strong)):
                if applied[slot, row]:
                    one = slice(row, row + 1)
                    expected[one] = apply_operations(expected[one], drawn[slot, one], magnitudes[slot, one])
        torch.testing.assert_close(seen[step].weak, expected, atol=1e-6, rtol=0)
        assert torch.equal(seen[step].images, images)


def test_training_does_not_touch_the_callers_randomness() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    classifier = Classifier(nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(192, 2)), mean=0, std=1)
    torch.set_rng_state(before)
    trainer = Trainer(classifier, CrossEntropy(), two_kinds(), Recipe(epochs=1, batch=8))
    trainer.step()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("steps", range(1, 12))
def test_the_schedule_takes_any_number_of_steps(steps: int) -> None:
    classifier = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), mean=0, std=1)
    trainer = Trainer(classifier, CrossEntropy(), two_kinds(8), Recipe(epochs=steps, batch=8))
    while not trainer.finished:
        trainer.step()
    assert trainer.steps_done == steps


def test_a_diverging_loss_is_said_to_diverge() -> None:
    classifier = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), mean=0, std=1)
    trainer = Trainer(classifier, CrossEntropy(), two_kinds(), Recipe(epochs=1, batch=8, lr=1e38))
    while not trainer.finished:
        trainer.step()
    with pytest.raises(ValueError, match="not finite after 5 steps: lower the learning rate"):
        trainer.mean_loss()


def test_precision_is_mixed_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    for capability, expected in (((7, 5), torch.float16), ((8, 6), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert choose_precision("auto", cuda) == expected
    assert choose_precision("off", cuda) is None
    assert choose_precision("auto", torch.device("cpu")) is None
    assert choose_precision("bf16", torch.device("cpu")) == torch.bfloat16


def test_a_branch_that_is_missing_is_named() -> None:
    classifier = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), mean=0, std=1)
    with pytest.raises(ValueError, match=r"ce\+rotation needs the branch rotation; the classifier has None"):
        Trainer(classifier, make_objective("ce+rotation"), two_kinds(), Recipe(epochs=1, batch=8))


def test_a_whole_run(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(world, "out", "--stats", "--epochs", "4")) == 0
    said = capsys.readouterr().out
    assert "resnet8: 2 classes, 8 x 8, 40 images to train on, 10 to validate, ce+contrastive, float32" in said
    assert "epoch 4/4: training loss" in said
    names = ["branch.safetensors", "bundle.json", "model.safetensors", "statistics.safetensors"]
    assert sorted(contents(world / "out")) == names

    bundle = load_bundle(world / "out")
    assert bundle.objective == make_objective("ce+contrastive")
    assert [set(epoch) for epoch in bundle.training["epochs"]] == [{"loss", "validation_error"}] * 4
    error = bundle.training["validation_error"]
    assert f"validation error {error:.2f} %" in said
    assert error == error_rate(bundle.classifier, two_kinds(10)) == bundle.training["epochs"][-1]["validation_error"]
    mean, std = two_kinds().pixel_moments()
    assert bundle.description.mean == pytest.approx(mean)
    assert bundle.description.std == pytest.approx(std)
    assert bundle.description.size == (8, 8)
    assert bundle.statistics is not None
    assert bundle.statistics.origin.counts == (20, 20)

    assert main(command(world, "out", "--stats", "--epochs", "4")) == 0
    assert "is complete: nothing to do" in capsys.readouterr().out


def test_the_layout_of_the_weights_changes_nothing_but_the_last_digits(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layouts = []

    def step(trainer: Trainer, original: Callable[[Trainer], None] = Trainer.step) -> None:
        weight = trainer.classifier.model.get_submodule("layer1.0.conv1").weight
        layouts.append(weight.is_contiguous(memory_format=torch.channels_last))
        original(trainer)

    monkeypatch.setattr(Trainer, "step", step)
    wide = ["--set", "width=16", "--epochs", "1"]
    assert main(command(world, "plain", *wide)) == 0
    assert main(command(world, "last", *wide, "--channels-last")) == 0
    assert main(command(world, "plain", *wide, "--channels-last")) == 2
    assert "channels_last: None there, True now" in capsys.readouterr().err
    half = len(layouts) // 2
    assert layouts == [False] * half + [True] * half
    plain, last = (load_bundle(world / out) for out in ("plain", "last"))
    assert last.training["settings"]["channels_last"] is True
    for (name, ours), theirs in zip(last.classifier.named_parameters(), plain.classifier.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, msg=name)


def test_a_killed_process_goes_on_bit_for_bit(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(world, "whole")) == 0
    code = (
        "import os, signal, sys\n"
        "from ttac.cli import main\n"
        "from ttac.source.train import Trainer\n"
        "step, calls = Trainer.step, iter(range(99))\n"
        "def stepping(self):\n"
        "    step(self)\n"
        "    if next(calls) == 7: os.kill(os.getpid(), signal.SIGKILL)\n"
        "Trainer.step = stepping\n"
        "main(sys.argv[1:])\n"
    )
    # As many threads as here, because sums that are split among threads are added in another order.
    environment = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run(
        [sys.executable, "-c", code, *command(world, "parts")], check=False, env={**os.environ, **environment}
    )
    assert killed.returncode == -signal.SIGKILL
    assert sorted(contents(world / "parts")) == ["progress.pt"]
    assert main(command(world, "parts")) == 0
    assert "going on after 7 of 15 steps" in capsys.readouterr().out
    assert contents(world / "parts") == contents(world / "whole")


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_batch_and_the_same_command_goes_on(
    signum: signal.Signals,
    code: int,
    world: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rarely = ("--checkpoint-every", "1000")
    assert main(command(world, "whole", *rarely)) == 0
    for call in (5, 1, 9):  # at an epoch's end, after the first step of a process, at the very end
        with monkeypatch.context() as patched:
            interrupt_at(call, lambda: signal.raise_signal(signum), patched)
            assert main(command(world, "parts", *rarely)) == code
    said = capsys.readouterr()
    assert "stopped after 6 of 15 steps; the same command goes on from there" in said.err
    assert "going on after 6 of 15 steps" in said.out
    assert not (world / "parts/bundle.json").exists()
    assert main(command(world, "parts", *rarely)) == 0
    assert contents(world / "parts") == contents(world / "whole")


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--batch", "4"], "batch: 8 there, 4 now"),
        (["--lr", "0.2"], "lr: 0.1 there, 0.2 now"),
        (["--strong", "0.5"], "strong: None there, 0.5 now"),
        (["--objective", "ce+rotation"], "objective: "),
        (["--set", "width=8"], "arch_options: {'width': 4} there, {'width': 8} now"),
        (["--val", "0.2"], "images: 40 there, 32 now"),
    ],
)
def test_other_settings_are_refused_and_nothing_changes(
    complete: bool,
    more: list[str],
    message: str,
    world: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patched:
        interrupt_at(10**5 if complete else 2, lambda: signal.raise_signal(signal.SIGINT), patched)
        assert main(command(world, "out", "--epochs", "1")) == (0 if complete else 130)
    before = contents(world / "out")
    assert main(command(world, "out", "--epochs", "1", *more)) == 2
    said = capsys.readouterr().err
    assert "is of another run" in said
    assert message in said
    assert contents(world / "out") == before


def test_other_data_are_refused(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patched:
        interrupt_at(2, lambda: signal.raise_signal(signal.SIGINT), patched)
        assert main(command(world, "out")) == 130
    np.save(world / "train_labels.npy", 1 - two_kinds().labels.numpy())
    assert main(command(world, "out")) == 2
    assert "is of another run (data: " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["bundle.json", "model.safetensors", "branch.safetensors", "progress.pt"])
def test_results_of_something_else_are_not_overwritten(
    name: str, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (world / "out").mkdir()
    (world / "out" / name).write_text("precious")
    assert main(command(world, "out")) == 2
    assert "error: " in capsys.readouterr().err
    assert contents(world / "out") == {name: b"precious"}


def test_two_processes_do_not_share_a_folder(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = []
    with monkeypatch.context() as patched:
        interrupt_at(3, lambda: codes.append(main(command(world, "out"))), patched)
        assert main(command(world, "out")) == 0
    assert codes == [2]
    assert "another process is writing to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--data": "{world}/nowhere"}, "no folder"),
        ({"--arch": "resnet9"}, "resnet9 has no option width; those with options: resnet8"),
        ({"--arch": "vit_small_32", "--set": "width=24"}, "does not take 8 x 8 images"),
        ({"--set": "depth=3"}, "resnet8 has no option depth"),
        ({"--set": "width"}, "--set"),
        ({"--set": "width=1.5"}, "options of networks are whole numbers"),
        ({"--set": "magnitude=99"}, "magnitude must be"),
        ({"--val": "1"}, "--val"),
        ({"--val": "0.1", "--val-data": "digits"}, "not both"),
        ({"--size": "16"}, "--size is for image files alone"),
        ({"--batch": "64"}, "40 images do not fill one batch of 64"),
        ({"--init": "{world}/first"}, "options of the network are those of the model to start from: leave them out"),
        ({"--device": "abacus"}, "device 'abacus' cannot be used"),
        ({"--std": "0"}, "std must be positive"),
        ({"--lr": "1e38"}, "lower the learning rate"),
        ({"--classes": "{world}/one.txt"}, "labels must be in 0..0; got 0..1"),
    ],
)
def test_mistakes_have_one_line_and_leave_no_bundle(
    change: dict[str, str], message: str, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (world / "one.txt").write_text("a\n")
    more = [part.format(world=world) for pair in change.items() for part in pair]
    assert main(command(world, "out", *more)) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert not (world / "out/bundle.json").exists()


def test_training_starts_from_another_model(world: Path) -> None:
    assert main(command(world, "first", "--objective", "ce+rotation")) == 0
    start = ["--lr", "1e-12", "--weight-decay", "0", "--epochs", "1", "--init", f"{world}/first"]
    base = [part for part in command(world, "second", *start) if part not in ("--set", "width=4", "--arch", "resnet8")]
    assert main([*base, "--init", f"{world}/nowhere.pt"]) == 2
    assert main([*base, "--objective", "ce+rotation"]) == 0
    first, second = load_bundle(world / "first"), load_bundle(world / "second")
    assert (second.description, second.objective) == (first.description, first.objective)
    for (name, before), after in zip(
        first.classifier.named_parameters(), second.classifier.parameters(), strict=True
    ):  # the branch too
        torch.testing.assert_close(before, after, msg=name)

    np.save(world / "train_labels.npy", np.arange(COUNT) % 4)
    base[base.index(f"{world}/second")] = f"{world}/third"
    assert main([*base, "--objective", "poly", "--set", "epsilon=2"]) == 0
    third = load_bundle(world / "third")
    assert (third.classifier.num_classes, third.objective) == (4, make_objective("poly", epsilon=2.0))
    assert third.description.mean == first.description.mean
    before, after = (bundle.classifier.model.conv1.weight for bundle in (first, third))  # type: ignore[union-attr]
    torch.testing.assert_close(before, after)


def test_from_a_folder_of_images_to_an_adapted_model(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = two_kinds()
    for number, image in enumerate(data.read(torch.arange(COUNT)).permute(0, 2, 3, 1).numpy()):
        path = world / "images" / ("top", "[bottom]")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).resize((10, 12)).save(path)
    out, images = f"{world}/bundle", f"{world}/images"
    train = ["train", "--data", images, "--out", out, "--arch", "resnet8", "--set", "width=4", "--epochs", "2"]
    assert main([*train, "--size", "8", "--batch", "9", "--val", "0.2", "--stats", "--no-flip"]) == 0
    assert "2 classes, 8 x 8, 32 images to train on, 8 to validate, ce, float32" in capsys.readouterr().out
    assert load_bundle(out).description.classes == ("[bottom]", "top")

    adapt = ["adapt", "--model", out, "--images", images, "--out", f"{world}/out", "--set", "window=8"]
    options = ["--set", "queue=0", "--set", "passes=1"]
    assert main([*adapt, *options]) == 0
    assert "anchors are those of the bundle, collected from 32 source images (source-light)" in capsys.readouterr().out
    assert Record.load(world / "out/record.json").provenance["knowledge"]["statistics"]["how"] == "collected"
    with (world / "out/predictions.csv").open(newline="") as table:
        assert {row["label"] for row in csv.DictReader(table)} <= {"top", "[bottom]"}

    stats = f"{world}/stats"
    assert main(["stats", "collect", "--model", out, "--images", images, "--out", stats, "--batch", "8"]) == 0
    assert "40 images, 20 to 20 in each of 2 classes by label" in capsys.readouterr().out
    assert main([*adapt, *options, "--stats", stats]) == 2
    assert "is of another run (statistics: " in capsys.readouterr().err
    assert (
        main(["adapt", "--model", out, "--images", images, "--out", f"{world}/bn", "--method", "bn", "--no-guard"]) == 0
    )
    assert Record.load(world / "bn/record.json").provenance["knowledge"] == {}


def test_digits_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    arguments = ["train", "--data", "digits", "--arch", "resnet8", "--set", "width=8", "--set", "stem_stride=2"]
    assert main([*arguments, "--objective", "poly", "--epochs", "2", "--batch", "32", "--out", str(tmp_path)]) == 0
    assert "797 images to train on, 1000 to validate, poly" in capsys.readouterr().out
    bundle = load_bundle(tmp_path)
    assert bundle.training["validation_error"] < 80
    assert bundle.training["settings"]["flip"] is False
    assert load_model(str(tmp_path)).classifier.num_classes == 10


def test_classes_without_an_image_are_named_before_the_first_step(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (world / "names.txt").write_text("top\nbottom\nleft\nright\n")
    with monkeypatch.context() as patched:
        interrupt_at(1, lambda: pytest.fail("it trained"), patched)
        assert main(command(world, "out", "--stats", "--classes", f"{world}/names.txt")) == 2
    said = capsys.readouterr().err
    assert "no image to train on of class left, right: " in said
    assert "leave --stats out" in said
    assert not (world / "out").exists()
    assert main(command(world, "out", "--epochs", "1", "--classes", f"{world}/names.txt")) == 0  # without statistics
    labels = two_kinds().labels.numpy()
    labels[labels == 1] = 2
    np.save(world / "train_labels.npy", labels)
    assert main(command(world, "numbers", "--stats")) == 2
    assert "no image to train on of class 1: " in capsys.readouterr().err


def folder_of_images(folder: Path, names: tuple[str, str]) -> str:
    """The images of `two_kinds` in subfolders: those bright on the top in that of the first name."""
    data = two_kinds()
    for number, image in enumerate(data.read(torch.arange(COUNT)).permute(0, 2, 3, 1).numpy()):
        path = folder / names[number % 2] / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    return str(folder)


def going_on_from(world: Path, data: str, out: str, *more: str) -> list[str]:
    return [
        "train", "--data", data, "--init", f"{world}/first", "--out", f"{world}/{out}", "--epochs", "1",
        "--batch", "8", "--lr", "1e-9", "--weight-decay", "0", *more,
    ]  # fmt: skip


def test_classes_keep_the_order_of_the_model_to_start_from(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (world / "names.txt").write_text("top\nbottom\n")  # not in the order of the alphabet
    names = ("--classes", f"{world}/names.txt", "--objective", "ce", "--epochs", "8")
    assert main(command(world, "first", *names)) == 0
    first = load_bundle(world / "first")
    assert first.description.classes == ("top", "bottom")
    assert first.training["validation_error"] < 20

    images = folder_of_images(world / "images", ("top", "bottom"))
    swapped = world / "swapped.txt"
    swapped.write_text("bottom\ntop\n")
    for out, more in (
        ("folder", [images]),
        ("share", [images, "--val", "0.3"]),
        ("held", [images, "--val-data", images]),
        ("named", [images, "--classes", str(swapped)]),
        ("arrays", [str(world)]),
    ):
        assert main(going_on_from(world, more[0], out, *more[1:])) == 0
        again = load_bundle(world / out)
        assert again.description.classes == ("top", "bottom"), out
        assert again.training["validation_error"] < 30, out
        assert again.training["epochs"][0]["loss"] < 0.6, out

    # Labels of arrays are numbers of the names given for them.
    for split, count in (("train", COUNT), ("test", 10)):
        np.save(world / f"{split}_labels.npy", 1 - two_kinds(count).labels.numpy())
    assert main(going_on_from(world, str(world), "numbers", "--classes", str(swapped))) == 0
    again = load_bundle(world / "numbers")
    assert again.description.classes == ("top", "bottom")
    assert again.training["validation_error"] < 20

    other = folder_of_images(world / "other", ("up", "bottom"))
    capsys.readouterr()
    assert main(going_on_from(world, other, "refused")) == 2
    said = capsys.readouterr().err
    assert "classes of the data are not those of the model (up instead of top)" in said
    assert not (world / "refused").exists()
    folder_of_images(world / "other", ("left", "right"))
    assert main(going_on_from(world, other, "more")) == 0  # of another number: a new head
    assert load_bundle(world / "more").description.classes == ("bottom", "left", "right", "up")
