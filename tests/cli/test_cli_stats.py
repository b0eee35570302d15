"""`ttac stats`: statistics from images, and from the head's weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapt_helpers import CLASSES, command, make_world

from ttac.cli import main
from ttac.source.loading import load_model, save_model
from ttac.source.statistics import SourceStatistics


@pytest.fixture
def world(tmp_path: Path) -> Path:
    return make_world(tmp_path)


def test_statistics_of_another_model_are_refused_with_both_fingerprints(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, stats = f"{world}/model.safetensors", f"{world}/stats.safetensors"
    assert main(["stats", "infer", "--model", model, "--out", stats]) == 0
    assert capsys.readouterr().out == f"{stats}: 4 classes and 16 features, inferred from the head (source-free)\n"
    assert main(command(world, "out", "--stats", stats)) == 0
    assert main(command(world, "again", "--stats", stats, "--model", f"{world}/out/adapted.safetensors")) == 2
    said = capsys.readouterr().err
    for path in (model, f"{world}/out/adapted.safetensors"):
        assert load_model(path).classifier.fingerprint() in said


def test_statistics_are_collected_by_subfolder_or_by_prediction(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, path in enumerate(sorted((world / "images").iterdir())):
        folder = world / "source" / CLASSES[number % 4]
        folder.mkdir(parents=True, exist_ok=True)
        path.rename(folder / path.name)
    collect = ["stats", "collect", "--model", f"{world}/model.safetensors", "--out", f"{world}/stats"]
    assert main([*collect, "--images", f"{world}/source", "--family", "diagonal"]) == 0
    said = capsys.readouterr().out
    assert "41 images, 10 to 11 in each of 4 classes by label, diagonal covariances, 3 depths, 2 unreadable" in said
    stats = SourceStatistics.load(world / "stats", load_model(f"{world}/model.safetensors").classifier)
    assert stats.origin.counts == (11, 10, 10, 10)

    assert main([*collect, "--images", f"{world}/source/ant"]) == 2
    assert "grouped by prediction" in capsys.readouterr().err
    (world / "source/eel").mkdir()
    (world / "source/ant/00.png").rename(world / "source/eel/00.png")
    assert main([*collect, "--images", f"{world}/source"]) == 2
    assert "no class of the model: eel" in capsys.readouterr().err
    assert main([*collect, "--images", f"{world}/source", "--family", "round"]) == 2
    assert main([*collect, "--images", f"{world}/source", "--group-by", "label", "--family", "round"]) == 2


def test_anchors_are_inferred_of_a_head_with_a_row_of_zeros_too(world: Path) -> None:
    loaded = load_model(f"{world}/model.safetensors")
    with torch.no_grad():
        loaded.classifier.head.weight[1] = 0
    save_model(world / "model.safetensors", loaded.classifier.model, loaded.description)
    assert main(command(world, "out")) == 0
