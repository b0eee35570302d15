"""`ttac train`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from ttac.cli.common import add_data_argument, let_own_networks_be_imported, new_parser, read_class_names, run_job

if TYPE_CHECKING:
    from ttac.source.objectives import Objective


def train_parser() -> ArgumentParser:
    """Describe `ttac train`."""
    parser = new_parser("Train a source model into a bundle; the same command goes on after a stop, bit for bit.")
    add_data_argument(parser)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="BUNDLE", help="folder for the trained model")
    add("--arch", type=str, metavar="NAME", help="network: of ttac, timm, torchvision, or module:callable")
    add("--init", type=str, metavar="BUNDLE|FILE|NAME", help="model to start from; its arch is the default")
    add(
        "--objective",
        type=Literal["ce", "ce+contrastive", "ce+rotation", "poly"],
        default="ce",
        metavar="NAME",
        help="ce, ce+contrastive, ce+rotation or poly (default: %(default)s)",
    )
    add(
        "--set",
        type=str,
        action="append",
        default=[],
        metavar="KEY=NUMBER",
        help="option of the network or the objective; can be repeated",
    )
    add("--epochs", type=PositiveInt, default=30, metavar="N", help="passes over the data (default: %(default)s)")
    add("--batch", type=PositiveInt, default=128, metavar="N", help="images a step (default: %(default)s)")
    add("--lr", type=PositiveFloat, default=0.1, metavar="X", help="peak of the one-cycle rate (default: %(default)s)")
    add("--weight-decay", type=NonNegativeFloat, default=5e-4, metavar="X", help="(default: %(default)s)")
    add("--no-flip", action="store_true", help="a mirrored image is not of its class")
    add("--seed", type=NonNegativeInt, default=0, metavar="N", help="of everything random (default: %(default)s)")
    add("--val", type=NonNegativeFloat, metavar="SHARE", help="validate on it (default: the data's test part, or 0.1)")
    add("--val-data", type=str, metavar="NAME|PATH", help="validate on data of their own")
    add("--size", type=PositiveInt, metavar="N", help="side to resize and crop image files to (default: as they are)")
    add("--classes", type=Path, metavar="FILE", help="class names, one a line (default: the subfolders)")
    add("--mean", type=float, nargs="+", metavar="X", help="pixel mean by channel (default: of the training images)")
    add("--std", type=float, nargs="+", metavar="X", help="pixel standard deviation by channel (default: likewise)")
    add("--stats", action="store_true", help="collect source statistics into the bundle too")
    add("--device", type=str, default="cpu", metavar="NAME", help="cpu, cuda, ... (default: %(default)s)")
    add(
        "--amp",
        type=Literal["auto", "off", "bf16", "fp16"],
        default="auto",
        metavar="HOW",
        help="mixed precision: off, bf16, fp16, or auto: on CUDA, where it pays (default: %(default)s)",
    )
    add(
        "--checkpoint-every",
        type=NonNegativeFloat,
        default=120.0,
        metavar="SECONDS",
        help="0: after every batch (default: %(default)s)",
    )
    return parser


def train_command(chosen: Namespace) -> int:
    """Train a source model."""
    from ttac.source.train import Recipe
    from ttac.source.train_job import TrainJob, run_train

    let_own_networks_be_imported(chosen.arch)
    objective, arch_options = parse_settings(chosen.objective, chosen.set)
    job = TrainJob(
        data=chosen.data,
        out=chosen.out,
        recipe=Recipe(
            epochs=int(chosen.epochs),
            batch=int(chosen.batch),
            lr=float(chosen.lr),
            weight_decay=float(chosen.weight_decay),
            flip=not chosen.no_flip,
            seed=int(chosen.seed),
        ),
        arch=chosen.arch,
        arch_options=arch_options,
        objective=objective,
        init=chosen.init,
        validation_share=None if chosen.val is None else float(chosen.val),
        validation_data=chosen.val_data,
        size=None if chosen.size is None else int(chosen.size),
        classes=None if chosen.classes is None else read_class_names(chosen.classes),
        mean=None if chosen.mean is None else tuple(chosen.mean),
        std=None if chosen.std is None else tuple(chosen.std),
        collect_statistics=chosen.stats,
        device=chosen.device,
        amp=chosen.amp,
        checkpoint_every=float(chosen.checkpoint_every),
    )
    return run_job(run_train, job)


def parse_settings(objective: str, pairs: Sequence[str]) -> tuple[Objective, dict[str, int]]:
    """Read `key=number` texts as parameters of the objective, and as options of the network where they are none.

    >>> parse_settings("poly", ["epsilon=2", "width=8"])
    (Poly(epsilon=2.0), {'width': 8})
    """
    from ttac.source.objectives import OBJECTIVES, make_objective

    known = {field.name for field in dataclasses.fields(OBJECTIVES[objective])}
    parameters: dict[str, float] = {}
    options: dict[str, int] = {}
    for pair in pairs:
        key, _, text = pair.partition("=")
        try:
            number = float(text)
        except ValueError as error:
            raise ValueError(f"--set wants key=number, not {pair!r}") from error
        if key in known:
            parameters[key] = int(number) if number.is_integer() else number
        elif number.is_integer():
            options[key] = int(number)
        else:
            raise ValueError(f"--set {pair}: options of networks are whole numbers")
    return make_objective(objective, **parameters), options
