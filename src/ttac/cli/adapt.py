"""`ttac adapt`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeFloat

from ttac.cli.common import (
    add_image_arguments,
    add_model_arguments,
    add_speed_arguments,
    load_chosen_model,
    new_parser,
    run_job,
)


def adapt_parser() -> ArgumentParser:
    """Describe `ttac adapt`."""
    parser = new_parser("Predict a folder of images in order while adapting; the same command goes on after a stop.")
    add_model_arguments(parser)
    add_speed_arguments(parser)
    add_image_arguments(parser)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FOLDER", help="where the predictions, weights and record go")
    add_method_arguments(parser)
    add(
        "--checkpoint-every",
        type=NonNegativeFloat,
        default=120.0,
        metavar="SECONDS",
        help="0: after every batch (default: %(default)s)",
    )
    return parser


def add_method_arguments(parser: ArgumentParser) -> None:
    """Add what names a method, its options and its statistics."""
    add = parser.add_argument
    add("--stats", type=Path, metavar="FILE", help="source statistics (default: the bundle's, or inferred, if needed)")
    add(
        "--method", type=str, default="ttac++", metavar="NAME", help="a wrong one lists them all (default: %(default)s)"
    )
    add("--preset", type=str, metavar="NAME", help="set of options that the method names")
    add("--set", type=str, action="append", default=[], metavar="KEY=VALUE", help="method's option; can be repeated")


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


def adapt_command(chosen: Namespace) -> int:
    """Stream a folder of images through an adapter."""
    from ttac.evaluation.adapt_folder import AdaptJob, run_adapt
    from ttac.evaluation.method_choice import MethodChoice

    choice = MethodChoice(
        load_chosen_model(chosen), chosen.method, chosen.preset, parse_options(chosen.method, chosen.set), chosen.stats
    )
    job = AdaptJob(choice, chosen.images, chosen.out, chosen.batch, chosen.checkpoint_every)
    return run_job(run_adapt, job)
