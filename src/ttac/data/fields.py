"""Settings that name data, for dataclasses that command lines are made of, and the job of `ttac corrupt`; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttac.common.options import Checked, setting

CORRUPTION_NAMES = "some by name, standard (fifteen), extra (four) or all (nineteen)"


def data_setting() -> Any:
    """Make the field that names a labelled data set."""
    return setting("digits", "data set of `ttac data list`, also NAME=FOLDER, or a folder of images or arrays")


def frost_setting() -> Any:
    """Make the field that names photographs of frost."""
    return setting(None, "photographs of frost (default: a texture that is computed)")


@dataclass(frozen=True, kw_only=True)
class PartSpec(Checked):
    """A part of a labelled data set."""

    data: str = data_setting()
    split: str = setting("test", "part of the data set")
    samples: int | None = setting(None, "N images alone, chosen at random (default: all)", least=1)


@dataclass(frozen=True, kw_only=True)
class CorruptJob(PartSpec):
    """Write a data set under corruptions in CIFAR-C's layout, five severities in a file; the same command goes on."""

    out: Path = setting(help="where the arrays and their record go", output="folder")
    corruptions: tuple[str, ...] = setting(("standard",), CORRUPTION_NAMES)
    seed: int = setting(0, "of all noise and texture", least=0)
    frost: Path | None = frost_setting()
    size: int | None = setting(None, "side to resize and crop image files to (default: as they are)", least=1)
    batch: int = setting(500, "images at a time", least=1)
    device: str = setting("cpu", "cpu, cuda, ...")
