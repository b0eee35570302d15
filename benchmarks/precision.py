"""What `Classifier.tuned` gains: one forward and backward pass of ResNet-20 in train mode, against float32 as it is.

python benchmarks/precision.py [--threads 2] [--out FILE]

No bounds, as the gain is the hardware's: bfloat16 is slow on processors without the instructions.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from table import run
from timing import Row, median_seconds
from torch import nn

import ttac
from ttac.model.networks import ResNet
from ttac.model.speed import bfloat16_in_hardware

WINDOW, FEW = 256, 32  # bfloat16 gets few images, as it may take seconds
NAME = "forward + backward of ResNet-20"


def training_pass(batch: int, **options: Any) -> Callable[[], None]:
    """Make forward and backward passes of one classifier."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the note says whether there are instructions
        classifier = ttac.Classifier(ResNet(20, 10), mean=0, std=1).tuned(**options).train()
    images, labels = torch.rand(batch, 3, 32, 32), torch.arange(batch) % 10

    def job() -> None:
        classifier.zero_grad()
        nn.functional.cross_entropy(classifier(images), labels).backward()

    return job


def measure(*, threads: int = 2) -> list[Row]:
    """Compare all options with none."""
    plain, laid_out = median_seconds(training_pass(WINDOW), training_pass(WINDOW, channels_last=True), rounds=3)
    note = f"{1000 * laid_out:.0f} ms for {WINDOW} images"
    row = Row(f"{NAME}, channels-last / as it is", laid_out / plain, "x", None, note)
    few, narrow = median_seconds(training_pass(FEW), training_pass(FEW, autocast="bfloat16"), rounds=1)
    has = {True: "has", False: "lacks", None: "may have"}[bfloat16_in_hardware()]
    note = f"{1000 * narrow:.0f} ms for {FEW} images; the processor {has} bfloat16 instructions"
    return [row, Row(f"{NAME}, bfloat16 / as it is", narrow / few, "x", None, note)]


if __name__ == "__main__":
    run(measure)
