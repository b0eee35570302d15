"""Models that people bring to a command: what is said of them, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapt_helpers import make_world

from ttac.cli import main
from ttac.model.networks import ResNet
from ttac.source.loading import load_model

NETWORK = "from ttac.model.networks import ResNet\ndef make(num_classes):\n    return ResNet(8, num_classes, width=4)\n"


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """Images, and a checkpoint with its network in a file."""
    make_world(tmp_path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = ResNet(8, 4, width=4)
    weights = {f"module.model.{name}": value for name, value in network.state_dict().items()}
    torch.save({"state_dict": weights, "hyper_parameters": {"lr": 0.1}}, tmp_path / "last.ckpt")
    torch.save(network, tmp_path / "whole.pt")
    (tmp_path / "nets.py").write_text(NETWORK)
    return tmp_path


def adapt(world: Path, *model: str) -> int:
    batches = ["--batch", "20", "--size", "16", "--method", "bn", "--set", "window=20"]
    return main(["adapt", *model, "--images", f"{world}/images", "--out", f"{world}/out", *batches])


def checkpoint(world: Path) -> list[str]:
    return ["--model", f"{world}/last.ckpt", "--arch", f"{world}/nets.py:make"]


def test_a_checkpoint_with_its_network_in_a_file(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert adapt(world, *checkpoint(world), "--mean", "0.5", "--std", "0.25") == 0
    said = capsys.readouterr().out
    assert "stripped 'module.model.' from the names of the weights" in said
    assert "mean 0.5, std 0.25" in said
    again = load_model(f"{world}/out/adapted.safetensors", f"{world}/nets.py:make")
    assert (again.description.mean, again.description.std) == ((0.5,), (0.25,))


@pytest.mark.parametrize("given", [[], ["--mean", "0.5"]])
def test_pixels_that_nothing_says_are_no_guess(
    given: list[str], world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert adapt(world, *checkpoint(world), *given) == 2
    error = capsys.readouterr().err
    assert "wants its pixels normalised: give --mean ... --std ..., or --mean 0 --std 1 if it takes raw pixels" in error
    assert not (world / "out").exists()


def test_the_usual_pixels_of_a_known_architecture_are_named(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = pytest.importorskip("torchvision").models
    torch.save(models.squeezenet1_1(num_classes=4).state_dict(), world / "m.pth.tar")
    assert adapt(world, "--model", f"{world}/m.pth.tar", "--arch", "squeezenet1_1") == 2
    assert "give --mean 0.485 0.456 0.406 --std 0.229 0.224 0.225 if it was trained with the" in capsys.readouterr().err


def test_a_pickled_model_needs_trust(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", f"{world}/whole.pt", "--mean", "0", "--std", "1"]
    assert adapt(world, *model) == 2
    assert "could run code" in capsys.readouterr().err
    assert adapt(world, *model, "--trust-pickle") == 0


def test_training_starts_from_a_checkpoint_that_says_its_pixels(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (world / "train/a").mkdir(parents=True)
    (world / "train/b").mkdir()
    for number in range(8):
        (world / f"images/{number:02d}.png").rename(world / f"train/{'ab'[number % 2]}/{number}.png")
    start = ["--init", f"{world}/last.ckpt", "--arch", f"{world}/nets.py:make"]
    command = ["train", "--data", f"{world}/train", "--size", "16", "--epochs", "1", "--batch", "4", "--val", "0"]
    assert main([*command, *start, "--out", f"{world}/bundle"]) == 2
    assert "give --mean ... --std ..." in capsys.readouterr().err
    assert main([*command, *start, "--mean", "0.5", "--std", "0.25", "--out", f"{world}/bundle"]) == 0
    assert "stripped 'module.model.'" in capsys.readouterr().out
