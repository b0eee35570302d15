"""What tests of commands that adapt a model to a folder share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ttac.evaluation.engine import Purpose, StreamWalk
from ttac.model.networks import ResNet
from ttac.source.loading import ModelDescription, save_model

RESULTS = ("predictions.csv", "adapted.safetensors")
CLASSES = ("ant", "bee", "cat", "[dog]")
COUNT = 43
BROKEN = ("10.png", "21.png")


def make_world(tmp_path: Path) -> Path:
    """Make a folder with a model, and images of which two cannot be read."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = ResNet(8, len(CLASSES), width=4)
    save_model(
        tmp_path / "model.safetensors",
        network,
        ModelDescription("resnet8", 4, size=(16, 16), classes=CLASSES, mean=(0.0,), std=(1.0,)),
    )
    random = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    for number in range(COUNT):
        pixels = random.integers(0, 256, (20, 18, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"images/{number:02d}.png")
    for name in BROKEN:
        (tmp_path / "images" / name).write_text("no image")
    return tmp_path


def command(world: Path, out: str, *more: str, guard: bool = False) -> list[str]:
    """Adapt the random network to the random images, which a guard would mostly keep away from it."""
    return [
        "adapt", "--model", f"{world}/model.safetensors", "--images", f"{world}/images", "--out", f"{world}/{out}",
        "--batch", "5", *([] if guard else ["--no-guard"]),
        "--set", "window=8", "--set", "queue=16", "--set", "passes=1", "--checkpoint-every", "0",
        *more,
    ]  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def interrupt_at(call: int, action: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something in the middle of a batch."""
    give, calls = StreamWalk._give, iter(range(1, 10**6))

    def giving(self: StreamWalk, images: torch.Tensor, purpose: Purpose, last: bool) -> torch.Tensor:
        logits = give(self, images, purpose, last)
        if next(calls) == call:
            action()
        return logits

    monkeypatch.setattr(StreamWalk, "_give", giving)
