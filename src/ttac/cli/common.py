"""What several commands share: arguments for models and images, and the model that they name."""

from __future__ import annotations

import dataclasses
import sys
from argparse import HelpFormatter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import PositiveInt

if TYPE_CHECKING:
    from rich.console import Console

    from ttac.model.weights import LoadedModel

Job = TypeVar("Job")


def new_parser(description: str) -> ArgumentParser:
    """Make a parser that takes no shortened names."""
    return ArgumentParser(description=description, allow_abbrev=False, formatter_class=HelpFormatter)


def add_model_arguments(parser: ArgumentParser) -> None:
    """Add what names a model and says how to use it."""
    add = parser.add_argument
    add(
        "--model",
        type=str,
        required=True,
        metavar="BUNDLE|FILE|NAME",
        help="folder of ttac train, weights (safetensors, pt, pth, bin), or timm name",
    )
    add(
        "--arch",
        type=str,
        metavar="NAME",
        help="network of the weights: of ttac, timm, torchvision, or module:callable",
    )
    add("--head", type=str, metavar="NAME", help="dotted name of the final linear layer (default: found)")
    add("--mean", type=float, nargs="+", metavar="X", help="pixel mean by channel, of images in [0, 1]")
    add("--std", type=float, nargs="+", metavar="X", help="pixel standard deviation by channel")
    add("--device", type=str, default="cpu", metavar="NAME", help="cpu, cuda, ... (default: %(default)s)")


def add_speed_arguments(parser: ArgumentParser) -> None:
    """Add what makes a model run faster on hardware that is made for it, with the same weights."""
    add = parser.add_argument
    add("--channels-last", action="store_true", help="memory layout of the weights, for convolutions of many channels")
    add(
        "--autocast",
        type=str,
        metavar="NAME",
        help="bfloat16: precision of forward passes, for processors that have the instructions",
    )
    add("--compile", action="store_true", help="compile the network, in the first passes; needs a C++ compiler")


def add_image_arguments(parser: ArgumentParser) -> None:
    """Add what names a stream of images."""
    add = parser.add_argument
    add("--images", type=Path, required=True, metavar="FOLDER", help="images, also in subfolders")
    add(
        "--batch", type=PositiveInt, default=64, metavar="N", help="images that arrive at a time (default: %(default)s)"
    )
    add("--size", type=PositiveInt, metavar="N", help="side to resize and crop images to (default: the model's)")
    add("--classes", type=Path, metavar="FILE", help="class names, one a line (default: the model's)")


def add_data_argument(parser: ArgumentParser) -> None:
    """Add what names a labelled data set."""
    parser.add_argument(
        "--data",
        type=str,
        default="digits",
        metavar="NAME|PATH",
        help="data set of `ttac data list`, folder of images or arrays, or NAME=PATH for a data set that is elsewhere "
        "(default: %(default)s, which come with scikit-learn)",
    )


def add_part_arguments(parser: ArgumentParser) -> None:
    """Add what names a labelled data set, and how much of it is used."""
    add_data_argument(parser)
    add = parser.add_argument
    add("--split", type=str, default="test", metavar="NAME", help="part of the data set (default: %(default)s)")
    add("--samples", type=PositiveInt, metavar="N", help="N images alone, chosen at random (default: all)")


def let_own_networks_be_imported(arch: str | None) -> None:
    """Look for modules in the current folder, where users keep their networks and console scripts do not look."""
    if ":" in (arch or ""):
        sys.path.append(str(Path.cwd()))


def read_class_names(file: Path) -> tuple[str, ...]:
    """Read class names, one a line."""
    return tuple(name.strip() for name in file.read_text(encoding="utf-8").splitlines())


def load_chosen_model(chosen: Namespace) -> LoadedModel:
    """Load the model that `add_model_arguments` names, as `add_speed_arguments` and `add_image_arguments` say."""
    from ttac.model.speed import Speed
    from ttac.source.loading import load_model

    let_own_networks_be_imported(chosen.arch)
    speed = Speed(chosen.channels_last, chosen.autocast, chosen.compile) if "compile" in chosen else None
    loaded = load_model(
        chosen.model,
        arch=chosen.arch,
        head=chosen.head,
        mean=chosen.mean,
        std=chosen.std,
        device=chosen.device,
        speed=speed,
    )
    description = loaded.description
    if chosen.get("size") is not None:
        description = dataclasses.replace(description, size=(chosen.size, chosen.size))
    if chosen.get("classes") is not None:
        description = dataclasses.replace(description, classes=read_class_names(chosen.classes))
    return dataclasses.replace(loaded, description=description)


def run_job(run: Callable[[Job, Console], None], job: Job) -> int:
    """Run a job that ends cleanly on a signal, and give the exit code."""
    from rich.console import Console

    from ttac.common.resumable import StoppedError

    try:
        run(job, Console(soft_wrap=True))
    except StoppedError as stop:
        sys.stderr.write(f"{stop}\n")
        return 128 + stop.signum
    return 0
