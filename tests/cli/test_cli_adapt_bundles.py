"""What a bundle tells the method that adapts it."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapt_helpers import make_world

from ttac import adapt
from ttac.cli import main
from ttac.data.folder import FolderStream, list_images
from ttac.evaluation.records import Record
from ttac.source.bundle import Bundle, save_bundle
from ttac.source.loading import load_model
from ttac.source.objectives import make_objective


@pytest.fixture
def world(tmp_path: Path) -> Path:
    return make_world(tmp_path)


def poly_bundle(world: Path, epsilon: float = 2.0) -> str:
    loaded = load_model(f"{world}/model.safetensors")
    folder = world / f"poly{epsilon}"
    save_bundle(folder, Bundle(loaded.classifier, loaded.description, make_objective("poly", epsilon=epsilon)))
    return str(folder)


def conjugate(world: Path, model: str, out: str, *more: str) -> int:
    images = ["--images", f"{world}/images", "--out", f"{world}/{out}", "--batch", "8"]
    return main(["adapt", "--model", model, *images, "--method", "conjugate", "--set", "window=8", *more])


def test_a_bundle_tells_the_method_which_loss_it_was_trained_with(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, plain = poly_bundle(world), f"{world}/model.safetensors"
    by_hand = ["--set", "source_loss=poly", "--set", "epsilon=2"]
    assert conjugate(world, bundle, "told") == 0
    assert "source_loss is poly, epsilon is 2.0, as the bundle was trained" in capsys.readouterr().out
    assert conjugate(world, bundle, "same", *by_hand) == 0
    assert conjugate(world, bundle, "preset", "--preset", "poly-digits", "--set", "epsilon=2", "--set", "lr=1e-3") == 0
    assert conjugate(world, plain, "by_hand", *by_hand) == 0
    assert conjugate(world, plain, "ce") == 0
    tables = {out: (world / out / "predictions.csv").read_bytes() for out in ("told", "same", "by_hand", "ce")}
    assert tables["told"] == tables["same"] == tables["by_hand"] != tables["ce"]
    options = Record.load(world / "told/record.json").provenance["settings"]["options"]
    assert (options["source_loss"], options["epsilon"]) == ("poly", 2.0)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--set", "source_loss=ce"], "source_loss=ce contradicts the model, which was trained with source_loss=poly"),
        (["--set", "epsilon=6"], "epsilon=6.0 contradicts the model, which was trained with epsilon=2.0"),
        (["--preset", "poly-digits"], "epsilon=6.0 contradicts the model, which was trained with epsilon=2.0"),
    ],
)
def test_options_that_contradict_the_bundle_are_refused(
    more: list[str], message: str, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert conjugate(world, poly_bundle(world), "out", *more) == 2
    assert message in capsys.readouterr().err
    assert not (world / "out").exists()


def test_a_bundle_says_nothing_to_methods_without_such_options(world: Path) -> None:
    images = ["--images", f"{world}/images", "--out", f"{world}/out"]
    assert main(["adapt", "--model", poly_bundle(world), *images, "--method", "bn"]) == 0
    assert Record.load(world / "out/record.json").provenance["settings"]["options"] == {}


def test_the_written_weights_are_those_that_predict(world: Path) -> None:
    images = ["--images", f"{world}/images", "--out", f"{world}/out", "--batch", "8", "--set", "window=8"]
    source = f"{world}/model.safetensors"
    assert main(["adapt", "--model", source, *images, "--method", "t3a"]) == 0
    adapter = adapt(load_model(source).classifier, "t3a", window=8)
    stream = FolderStream(world / "images", list_images(world / "images"), 8, (16, 16), 3, 1.0, lambda *_: None)
    for images_of_batch, _ in stream:
        adapter(images_of_batch)
    written = load_model(f"{world}/out/adapted.safetensors").classifier
    assert written.fingerprint() == adapter.adapted().fingerprint() != adapter.classifier.fingerprint()
