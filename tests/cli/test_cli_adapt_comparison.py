"""What `ttac adapt` says that adaptation bought, against plain re-computations."""

from __future__ import annotations

import copy
import csv
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from adapt_helpers import BROKEN, CLASSES, COUNT, command, interrupt_at, make_world
from PIL import Image
from torch import Tensor, nn

from ttac.cli import main
from ttac.data.folder import FolderStream, list_images
from ttac.evaluation.records import Record
from ttac.source.loading import load_model, save_model

WINDOW, BATCH = 8, 5
READABLE = COUNT + 1 - len(BROKEN)  # five windows and two images


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """A world whose last window has two images, and whose model sees all of its classes in them."""
    world = make_world(tmp_path)
    Image.open(world / "images/00.png").rotate(90).resize((18, 20)).save(world / f"images/{COUNT}.png")
    loaded = load_model(f"{world}/model.safetensors")
    network = loaded.classifier.model
    logits = answer(network, torch.cat([images for images, _ in batches(world)]))
    with torch.no_grad():
        network.get_submodule(loaded.classifier.head_name).bias.sub_(logits.mean(0))  # type: ignore[union-attr]
    save_model(world / "model.safetensors", network, loaded.description)
    return world


def quick(world: Path, out: str, *more: str) -> list[str]:
    """A command of a method that is as quick as it can be, TENT."""
    plain = command(world, out)
    return [*plain[: plain.index("--set")], "--method", "tent", "--set", "window=8", "--checkpoint-every", "0", *more]


def labels_file(world: Path) -> dict[str, int]:
    """Write labels, half of them as names, and give them by file."""
    labels = {name: number % len(CLASSES) for number, name in enumerate(list_images(world / "images"))}
    with (world / "labels.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["note", "file", "label"])
        for name, label in labels.items():
            table.writerow(["x", name, CLASSES[label] if label % 2 else label])
    return labels


def batches(world: Path) -> list[tuple[Tensor, list[str]]]:
    return list(FolderStream(world / "images", list_images(world / "images"), BATCH, (16, 16), 3))


def answer(network: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        return network.eval()(images)


def bn_by_hand(network: nn.Module, arrivals: list[Tensor]) -> Tensor:
    """Average the statistics of windows, the first in place of the source's, and predict what comes with each after it.

    The stream's end is a window too, of what is left and of the images before it that BN still remembers.
    """
    network = copy.deepcopy(network)
    layers = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    images = torch.cat(arrivals)
    arrived = torch.tensor([len(batch) for batch in arrivals]).cumsum(0).tolist()
    answers, start, counted = [], 0, 0
    for end in sorted({*arrived, *range(WINDOW, len(images), WINDOW)}):
        if end % WINDOW == 0 or (end == len(images) and end % WINDOW > 1):
            window = images[max(0, end - WINDOW) : end]
            counted += len(window)
            for layer in layers:
                layer.momentum = len(window) / counted
            with torch.no_grad():
                network.train()(window)
        answers.append(answer(network, images[start:end]))
        start = end
    return torch.cat(answers)


def adapted_labels(world: Path, out: str) -> list[int]:
    with (world / out / "predictions.csv").open(newline="") as table:
        return [CLASSES.index(row["label"]) for row in csv.DictReader(table)]


def test_its_numbers_are_those_of_a_plain_recomputation(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = labels_file(world)
    assert main(quick(world, "out", "--labels", f"{world}/labels.csv")) == 0
    record = Record.load(world / "out/record.json")
    assert record.comparison is not None
    models: dict[str, dict[str, Any]] = record.comparison["models"]
    assert (list(models), record.comparison["images"]) == (["frozen", "bn", "adapted"], READABLE)

    network = load_model(f"{world}/model.safetensors").classifier.model
    arrivals = [images for images, _ in batches(world)]
    truth = torch.tensor([labels[name] for _, names in batches(world) for name in names])
    logits = {
        "frozen": torch.cat([answer(network, images) for images in arrivals]),
        "bn": bn_by_hand(network, arrivals),
    }
    predicted = {name: output.argmax(1) for name, output in logits.items()}
    predicted["adapted"] = torch.tensor(adapted_labels(world, "out"))
    for name, output in logits.items():
        posteriors = output.double().softmax(1)
        assert models[name]["confidence"] == pytest.approx(float(posteriors.amax(1).mean()), abs=1e-5)
        assert models[name]["entropy"] == pytest.approx(float(-(posteriors * posteriors.log()).sum(1).mean()), abs=1e-5)
    for name, found in predicted.items():
        assert models[name]["counts"] == torch.bincount(found, minlength=len(CLASSES)).tolist()
        assert models[name]["error"] == pytest.approx(100 * float((found != truth).float().mean()))
        differing = {other: float((found != theirs).float().mean()) for other, theirs in predicted.items()}
        assert models[name]["differs_from"] | {name: 0} == pytest.approx(differing)
        assert len(found.unique()) > 1
    assert models["adapted"]["differs_from"]["frozen"] > 0
    assert record.error == models["adapted"]["error"]
    assert record.provenance["updates"] == 6
    said = capsys.readouterr().out
    assert f"{COUNT + 1} images, 6 updates of 8, about " in said
    assert f"{READABLE} images predicted, 6 updates, 2 unreadable, {record.error:.2f} % error" in said


def test_a_resumed_run_has_the_same_comparison(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(quick(world, "whole")) == 0
    for call in (4, 3):
        with monkeypatch.context() as patched:
            interrupt_at(call, lambda: signal.raise_signal(signal.SIGTERM), patched)
            assert main(quick(world, "parts")) == 143
    assert main(quick(world, "parts")) == 0
    found = []
    for out in ("whole", "parts"):
        comparison = Record.load(world / out / "record.json").comparison
        assert comparison is not None
        for model in comparison["models"].values():
            assert model.pop("seconds_an_image") > 0
        page = (world / out / "comparison.html").read_text()
        assert "<figure>" in page
        found.append((comparison, page[page.index("<h2>Changed predictions") :]))
    assert found[0] == found[1]


def test_a_short_folder_with_broken_files_at_its_end_is_learned_from(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(24, COUNT + 1):
        (world / f"images/{number}.png").write_text("no image")
    source = f"{world}/model.safetensors"
    arguments = ["adapt", "--model", source, "--images", f"{world}/images", "--method", "tent"]
    assert main([*arguments, "--out", f"{world}/out", "--set", "window=24"]) == 0
    said = capsys.readouterr().out
    assert "44 images, 2 updates of 24" in said
    assert "22 images predicted, 1 update, 22 unreadable" in said
    assert "warning" not in said
    adapted = load_model(f"{world}/out/adapted.safetensors").classifier
    assert adapted.fingerprint() != load_model(source).classifier.fingerprint()
    comparison = Record.load(world / "out/record.json").comparison
    assert comparison is not None
    assert comparison["models"]["bn"]["confidence"] != comparison["models"]["frozen"]["confidence"]


def test_a_method_that_could_learn_nothing_says_so(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (world / "images").iterdir():
        if path.name != "00.png":
            path.unlink()
    assert main(quick(world, "out")) == 0
    said = capsys.readouterr().out
    assert "1 image, 0 updates of 1" in said
    assert "1 image predicted, 0 updates, 0 unreadable" in said
    assert "warning: no update was made, and TENT has learned nothing" in said


def test_without_a_comparison_no_other_model_is_run(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(quick(world, "out", "--no-compare", "--labels", f"{world}/labels.csv")) == 2
    labels_file(world)
    assert main(quick(world, "out", "--no-compare", "--labels", f"{world}/labels.csv")) == 0
    assert not (world / "out/comparison.html").exists()
    record = Record.load(world / "out/record.json")
    assert record.comparison is not None
    assert list(record.comparison["models"]) == ["adapted"]
    assert record.error == record.comparison["models"]["adapted"]["error"] is not None
    assert "differs from" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("method", "columns", "said"),
    [
        ("bn", ["frozen", "adapted"], "44 images, 1 update of 44"),
        ("test", ["frozen", "bn", "adapted"], "no updates: TEST does not"),
    ],
)
def test_a_method_is_not_compared_with_itself_in_disguise(
    method: str, columns: list[str], said: str, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--images", f"{world}/images", "--out", f"{world}/out", "--method", method]
    assert main(["adapt", "--model", f"{world}/model.safetensors", *arguments]) == 0
    comparison = Record.load(world / "out/record.json").comparison
    assert comparison is not None
    assert list(comparison["models"]) == columns
    if method == "test":
        assert comparison["models"]["adapted"]["differs_from"]["frozen"] == 0
    assert said in capsys.readouterr().out


def test_labels_that_do_not_fit_are_refused_before_anything_is_written(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (world / "labels.csv").write_text("file,label\n00.png,bird\n")
    assert main(quick(world, "out", "--labels", f"{world}/labels.csv")) == 2
    assert "no class 'bird' (names are ant, bee, cat, [dog]; numbers are 0 to 3)" in capsys.readouterr().err
    assert not (world / "out").exists()


def test_the_help_tells_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["adapt", "--help"])
    assert stop.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    for code in ("0: done", "2: a mistake", "130: interrupted", "143: terminated"):
        assert code in said


def test_the_page_shows_the_images_whose_prediction_changed(world: Path) -> None:
    assert main(quick(world, "out")) == 0
    with torch.no_grad():
        network = load_model(f"{world}/model.safetensors").classifier.model
        before = torch.cat([answer(network, images) for images, _ in batches(world)]).argmax(1).tolist()
    with (world / "out/predictions.csv").open(newline="") as table:
        after = [(row["file"], row["label"], float(row["confidence"])) for row in csv.DictReader(table)]
    changed = [(name, CLASSES[old], new, sure) for (name, new, sure), old in zip(after, before, strict=True)]
    changed = sorted((one for one in changed if one[1] != one[2]), key=lambda one: -one[3])
    page = (world / "out/comparison.html").read_text()
    figures = page.split("<figure>")[1:]
    assert len(figures) == len(changed) > 0
    for figure, (name, old, new, sure) in zip(figures, changed, strict=True):
        assert f"<b>{new}</b> {sure:.0%}" in figure
        assert f"was {old} " in figure
        assert f">{name}<" in figure
        assert 'src="data:image/png;base64,' in figure
