"""`ttac adapt`: what it predicts, writes and says, and the message for every mistake."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from adapt_helpers import BROKEN, CLASSES, COUNT, command, contents, make_world
from safetensors.torch import save_file

from ttac import adapt
from ttac.cli import main
from ttac.common.cells import original
from ttac.data.folder import FolderStream, list_images
from ttac.evaluation.records import Record
from ttac.source.loading import load_model
from ttac.source.statistics import SourceStatistics


@pytest.fixture
def world(tmp_path: Path) -> Path:
    return make_world(tmp_path)


def test_a_whole_run(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(world, "out")) == 0
    said = capsys.readouterr().out
    assert "resnet8: 4 classes, 16 x 16, mean 0, std 1" in said
    assert "inferred from the head's weights (source-free)" in said
    assert "skipped '10.png': not an image" in said
    assert "images/s, 5 updates" in said
    assert "41 images predicted, 5 updates, 2 unreadable" in said

    out = world / "out"
    files = ["adapted.safetensors", "comparison.html", "inferred.safetensors", "predictions.csv", "record.json"]
    assert sorted(contents(out)) == files
    with (out / "predictions.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    assert [row["file"] for row in rows] == [f"{n:02d}.png" for n in range(COUNT) if f"{n:02d}.png" not in BROKEN]
    assert {row["label"] for row in rows} <= set(CLASSES)
    assert all(0.25 <= float(row["confidence"]) <= 1 for row in rows)

    record = Record.load(out / "record.json")
    assert (record.samples, record.error) == (41, None)
    assert record.provenance["images"] == "images"
    assert [name for name, _ in record.provenance["unreadable"]] == list(BROKEN)
    assert record.provenance["arrival_batch_sizes"] == [3, 4, 5]
    assert record.provenance["reset"] == "fresh"

    source, adapted = (load_model(str(path)) for path in (world / "model.safetensors", out / "adapted.safetensors"))
    assert adapted.description == source.description
    assert adapted.classifier.fingerprint() != source.classifier.fingerprint()


def test_predictions_are_those_of_the_adapter(world: Path) -> None:
    assert main(command(world, "out")) == 0
    again = load_model(f"{world}/model.safetensors")
    stats = SourceStatistics.load(world / "out/inferred.safetensors", again.classifier)
    adapter = adapt(again.classifier, stats=stats, window=8, queue=16, passes=1)
    files = list_images(world / "images")
    logits = torch.cat([adapter(images) for images, _ in FolderStream(world / "images", files, 5, (16, 16), 3)])
    with (world / "out/predictions.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    assert [CLASSES.index(row["label"]) for row in rows] == logits.argmax(1).tolist()
    confidence = torch.tensor([float(row["confidence"]) for row in rows])
    torch.testing.assert_close(confidence, logits.softmax(1).max(1).values, atol=1e-6, rtol=0)


def test_adapted_weights_load_into_the_plain_model_as_the_docs_show(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timm = pytest.importorskip("timm", reason="the network is one of timm's: pip install 'ttac[timm]'")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save_file(timm.create_model("test_resnet", num_classes=4).state_dict(), world / "plain.safetensors")
    model = ["--model", f"{world}/plain.safetensors", "--arch", "test_resnet", "--size", "32"]
    pixels = ["--mean", "0.5", "0.4", "0.3", "--std", "0.2", "0.2", "0.3"]
    assert main(command(world, "adapted", *model, *pixels)) == 0
    page = (Path(__file__).parents[2] / "docs/outputs.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    monkeypatch.chdir(world)
    exec(code.replace('"resnet50", num_classes=10', '"test_resnet", num_classes=4'), names)
    adapted = load_model("adapted/adapted.safetensors").classifier
    images = torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(names["predict"](images), adapted(images))
        source = load_model("plain.safetensors", arch="test_resnet", mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.3))
        assert not torch.allclose(source.classifier(images), adapted(images), atol=1e-3)


def test_curves_can_be_watched(world: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert main(command(world, "out", "--log", f"tensorboard:{world}/runs")) == 0
    found = reader.EventAccumulator(f"{world}/runs/out")
    found.Reload()
    steps = [one.step for one in found.Scalars("seconds_per_update")]
    assert steps == [step for step, _ in Record.load(world / "out/record.json").losses]
    assert "error" not in found.Tags()["scalars"]


def test_links_that_lead_nowhere_are_skipped(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (world / "images/around.png").symlink_to("around.png")
    (world / "images/gone.png").symlink_to("nothing.png")
    for _ in range(2):  # the second one finds all done, by the same settings
        assert main(command(world, "out")) == 0
    said = capsys.readouterr().out
    assert "skipped 'around.png': Too many levels of symbolic links" in said
    assert "skipped 'gone.png': No such file or directory" in said
    assert "41 images predicted, 5 updates, 4 unreadable" in said
    assert "is complete: nothing to do" in said


def test_names_of_files_and_classes_are_no_formulas(world: Path) -> None:
    strange = {"00.png": "=1+1.png", "01.png": "-2.png", "02.png": "@sum(a).png", "03.png": "'+3.png"}
    for name, new in strange.items():
        (world / "images" / name).rename(world / "images" / new)
    classes = ("=cmd|' /C calc'!A0", "+bee", "-1", "dog")
    (world / "classes.txt").write_text("\n".join(classes))
    assert main(command(world, "out", "--classes", f"{world}/classes.txt")) == 0
    with (world / "out/predictions.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    cells = {cell for row in rows for cell in row.values()}
    assert not {cell for cell in cells if cell[0] in "=+-@" and cell != "-1"}
    assert {original(row["file"]) for row in rows} >= set(strange.values())
    assert {original(row["label"]) for row in rows} <= set(classes)
    assert all(0.25 <= float(row["confidence"]) <= 1 for row in rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--model": "{world}/nowhere.pt"}, "error: no model file"),
        ({"--model": "bundle/"}, "error: no model file bundle/, nor a bundle"),
        ({"--images": "{world}/nowhere"}, "error: no folder"),
        ({"--images": "{world}/empty"}, "error: no image in"),
        ({"--images": "{world}/broken"}, "error: none of 1 images could be read"),
        ({"--stats": "{world}/nowhere"}, "error: no statistics file"),
        ({"--stats": "{world}/model.safetensors"}, "is not a readable statistics file"),
        ({"--out": "{world}/model.safetensors"}, "is a file; name a folder"),
        ({"--method": "ttaac"}, "unknown method: 'ttaac'; did you mean ttac"),
        ({"--preset": "papper"}, "unknown preset of ttac++: 'papper'; did you mean paper"),
        ({"--set": "windo=3"}, "unknown option of ttac++: 'windo'; did you mean window"),
        ({"--set": "window"}, "--set"),
        ({"--set": "window=wide"}, "--set window"),
        ({"--set": "window=0"}, "window must be at least 2"),
        ({"--set": "flip=maybe"}, "--set flip"),
        ({"--batch": "0"}, "--batch"),
        ({"--autocast": "float8"}, "--autocast"),
        ({"--classes": "{world}/two.txt"}, "there are 2 class names for 4 classes"),
        ({"--classes": "{world}/nowhere.txt"}, "nowhere.txt"),
        ({"--head": "conv1"}, "error: head='conv1'"),
        ({"--std": "0"}, "std must be positive"),
        ({"--device": "abacus"}, "device 'abacus' cannot be used"),
        ({"--arch": "resnet14"}, "do not fit resnet14"),
    ],
)
def test_mistakes_have_one_line_and_leave_no_results(
    change: dict[str, str], message: str, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (world / "empty").mkdir()
    (world / "broken").mkdir()
    (world / "broken/a.png").write_text("no image")
    (world / "two.txt").write_text("a\nb\n")
    more = [part.format(world=world) for pair in change.items() for part in pair]
    assert main(command(world, "out", *more)) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert "Traceback" not in said
    assert not (world / "out/predictions.csv").exists()


def test_a_model_that_takes_other_sizes_is_asked_before_anything_is_written(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = (
        "import torch\ndef net(): return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 4))\n"
    )
    (world / "my_networks.py").write_text(module)
    torch.save(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 4)).state_dict(), world / "flat.pt")
    monkeypatch.chdir(world)
    monkeypatch.setattr(sys, "path", [*sys.path])
    flat = ["--model", "flat.pt", "--arch", "my_networks:net", "--mean", "0", "--std", "1", "--method", "bn"]
    plain = command(world, "out")[: command(world, "out").index("--set")]
    assert main([*plain, *flat]) == 2
    assert "the model does not take 20 x 18 images" in capsys.readouterr().err
    assert not (world / "out").exists()
    assert main([*plain, *flat, "--size", "16"]) == 0
    with (world / "out/predictions.csv").open(newline="") as table:
        assert {row["label"] for row in csv.DictReader(table)} <= {"0", "1", "2", "3"}
