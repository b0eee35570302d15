"""The command line; what takes long to import is imported by the command that needs it."""

from __future__ import annotations

import dataclasses
import sys
from argparse import HelpFormatter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jsonargparse import ArgumentError, ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveInt

from ttac import __version__

if TYPE_CHECKING:
    from ttac.source.models import LoadedModel


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; mistakes of the user end with one line and the code 2."""
    chosen = build_parser().parse_args(arguments)
    command, details = chosen.command, chosen[chosen.command]
    if command == "stats":
        command, details = f"stats {details.action}", details[details.action]
    try:
        return COMMANDS[command](details)
    except (ValueError, TypeError, OSError, ImportError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130


def build_parser() -> ArgumentParser:
    """Describe all commands."""
    parser = _parser("Test-time adaptation of classifiers on a live stream.")
    parser.prog = "ttac"
    parser.add_argument("--version", action="version", version=f"ttac {__version__}", help="print the version and exit")
    commands = parser.add_subcommands(dest="command")
    commands.add_subcommand("adapt", _adapt_parser(), help="adapt a model to a folder of images")
    stats = _parser("Make the statistics of a source model that methods anchor to.")
    commands.add_subcommand("stats", stats, help="make source statistics")
    actions = stats.add_subcommands(dest="action")
    actions.add_subcommand("collect", _collect_parser(), help="from source images")
    actions.add_subcommand("infer", _infer_parser(), help="from the head's weights alone")
    commands.add_subcommand("demo", _demo_parser(), help="train, shift, adapt and report on small images")
    return parser


def _parser(description: str) -> ArgumentParser:
    return ArgumentParser(description=description, allow_abbrev=False, formatter_class=HelpFormatter)


def _adapt_parser() -> ArgumentParser:
    parser = _parser("Predict a folder of images in order while adapting; the same command goes on after a stop.")
    _add_model_arguments(parser)
    _add_image_arguments(parser)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FOLDER", help="where the predictions, weights and record go")
    add("--stats", type=Path, metavar="FILE", help="source statistics (default: inferred if the method needs them)")
    add(
        "--method", type=str, default="ttac++", metavar="NAME", help="a wrong one lists them all (default: %(default)s)"
    )
    add("--preset", type=str, metavar="NAME", help="set of options that the method names")
    add("--set", type=str, action="append", default=[], metavar="KEY=VALUE", help="method's option; can be repeated")
    add(
        "--checkpoint-every",
        type=NonNegativeFloat,
        default=120.0,
        metavar="SECONDS",
        help="0: after every batch (default: %(default)s)",
    )
    return parser


def _collect_parser() -> ArgumentParser:
    parser = _parser("Collect statistics from source images, in one subfolder for each class or without any.")
    _add_model_arguments(parser)
    _add_image_arguments(parser)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="statistics to write")
    add(
        "--family",
        type=str,
        metavar="NAME",
        help="full, low-rank, diagonal or isotropic (default: the richest that fits)",
    )
    add(
        "--group-by",
        type=Literal["auto", "label", "prediction"],
        default="auto",
        metavar="HOW",
        help="label (class subfolder), prediction, or auto: by label if there are subfolders (default: %(default)s)",
    )
    return parser


def _infer_parser() -> ArgumentParser:
    parser = _parser("Infer statistics from the weights of the model's head.")
    _add_model_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="statistics to write")
    return parser


def _demo_parser() -> ArgumentParser:
    parser = _parser("Train a small network, shift its test images, adapt to them, and report.")
    add = parser.add_argument
    add("--out", type=Path, default=Path("out/demo"), metavar="FOLDER", help="report (default: %(default)s)")
    add("--seed", type=NonNegativeInt, default=0, metavar="N", help="of everything random (default: %(default)s)")
    add("--cache", type=Path, metavar="FOLDER", help="keeps the trained network (default: the user's cache)")
    return parser


def _add_model_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model",
        type=str,
        required=True,
        metavar="FILE|NAME",
        help="weights (safetensors, pt, pth, bin), or timm name",
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


def _add_image_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--images", type=Path, required=True, metavar="FOLDER", help="images, also in subfolders")
    add(
        "--batch", type=PositiveInt, default=64, metavar="N", help="images that arrive at a time (default: %(default)s)"
    )
    add("--size", type=PositiveInt, metavar="N", help="side to resize and crop images to (default: the model's)")
    add("--classes", type=Path, metavar="FILE", help="class names, one a line (default: the model's)")


def _load_model(chosen: Namespace) -> LoadedModel:
    from ttac.source.models import LoadedModel, load_model

    if ":" in (chosen.arch or ""):
        sys.path.append(str(Path.cwd()))  # where users keep their networks, and where console scripts do not look
    loaded = load_model(
        chosen.model, arch=chosen.arch, head=chosen.head, mean=chosen.mean, std=chosen.std, device=chosen.device
    )
    description = loaded.description
    if chosen.get("size") is not None:
        description = dataclasses.replace(description, size=(chosen.size, chosen.size))
    if chosen.get("classes") is not None:
        names = chosen.classes.read_text(encoding="utf-8").splitlines()
        description = dataclasses.replace(description, classes=tuple(name.strip() for name in names))
    return LoadedModel(loaded.classifier, description)


def parse_options(method: str, pairs: Sequence[str]) -> dict[str, Any]:
    """Read `key=value` texts as the types of the method's options.

    >>> parse_options("bn", ["window=64"])
    {'window': 64}
    """
    from ttac.methods.registry import methods

    known = methods().get(method)
    parser = ArgumentParser(exit_on_error=False)
    if known is not None:
        parser.add_class_arguments(known.options_type)
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"--set wants key=value, not {pair!r}")
        options[key] = text
        if known is not None and key in {option.name for option in dataclasses.fields(known.options_type)}:
            try:
                options[key] = parser.parse_args([f"--{key}={text}"])[key]
            except ArgumentError as error:
                raise ValueError(f"--set {pair}: {error}") from error
    return options  # unknown names are left to `ttac.adapt`, which suggests what was meant


def _adapt(chosen: Namespace) -> int:
    from rich.console import Console

    from ttac.deploy import AdaptJob, StoppedError, run_adapt

    job = AdaptJob(
        model=_load_model(chosen),
        images=chosen.images,
        out=chosen.out,
        stats=chosen.stats,
        method=chosen.method,
        preset=chosen.preset,
        options=parse_options(chosen.method, chosen.set),
        batch=chosen.batch,
        checkpoint_every=chosen.checkpoint_every,
    )
    try:
        run_adapt(job, Console(soft_wrap=True))
    except StoppedError as stop:
        sys.stderr.write(f"{stop}\n")
        return 128 + stop.signum
    return 0


def _collect(chosen: Namespace) -> int:
    import torch

    from ttac.data.folder import FolderStream, labels_by_subfolder, list_images
    from ttac.source.statistics import SourceStatistics

    loaded = _load_model(chosen)
    classifier, description = loaded.classifier, loaded.description
    files = list_images(chosen.images)
    unreadable: list[str] = []

    def report(name: str, reason: str) -> None:
        unreadable.append(name)
        sys.stderr.write(f"skipped {name}: {reason}\n")

    stream = FolderStream(
        chosen.images,
        files,
        chosen.batch,
        description.size,
        classifier.channels,
        description.crop_pct,
        report,
    )
    group_by = chosen.group_by
    if group_by == "auto":
        group_by = "label" if any("/" in name for name in files) else "prediction"
    labels = labels_by_subfolder(files, classifier.num_classes, description.classes) if group_by == "label" else {}
    loader = (
        (images, torch.tensor([labels[name] for name in names])) if labels else images for images, names in stream
    )
    stats = SourceStatistics.collect(classifier, loader, group_by=group_by, family=chosen.family)
    stats.save(chosen.out)
    counts = stats.origin.counts
    print(
        f"{chosen.out}: {stats.origin.samples} images, {min(counts)} to {max(counts)} in each of {len(counts)} classes "
        f"by {group_by}, {stats.classes.covariance.family} covariances, {len(unreadable)} unreadable"
    )
    return 0


def _infer(chosen: Namespace) -> int:
    from ttac.source.statistics import SourceStatistics

    loaded = _load_model(chosen)
    stats = SourceStatistics.infer(loaded.classifier)
    stats.save(chosen.out)
    classes, features = stats.classes.mean.shape
    print(f"{chosen.out}: {classes} classes and {features} features, inferred from the head (source-free)")
    return 0


def _demo(chosen: Namespace) -> int:
    from ttac.demo import run_demo

    run_demo(chosen.out, chosen.seed, cache=chosen.cache)
    return 0


COMMANDS: dict[str, Callable[[Namespace], int]] = {
    "adapt": _adapt,
    "stats collect": _collect,
    "stats infer": _infer,
    "demo": _demo,
}

if __name__ == "__main__":
    sys.exit(main())
