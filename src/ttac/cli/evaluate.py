"""`ttac evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeInt, PositiveInt

from ttac.cli.adapt import add_method_arguments, parse_options
from ttac.cli.common import (
    add_data_argument,
    add_model_arguments,
    add_speed_arguments,
    load_chosen_model,
    new_parser,
    run_job,
)


def evaluate_parser() -> ArgumentParser:
    """Describe `ttac evaluate`."""
    parser = new_parser("Measure a method on a stream of labelled images, which it never sees the labels of.")
    add_model_arguments(parser)
    add_speed_arguments(parser)
    add_method_arguments(parser)
    _add_data_arguments(parser)
    _add_scenario_arguments(parser)
    add = parser.add_argument
    add("--protocol", type=str, default="N-O-SF", metavar="NAME", help="what is allowed (default: %(default)s)")
    add("--epochs", type=PositiveInt, metavar="N", help="passes of the multi-pass protocols (default: 3)")
    add("--out", type=Path, required=True, metavar="FILE", help="record to write; one that is there is not replaced")
    return parser


def _add_data_arguments(parser: ArgumentParser) -> None:
    add_data_argument(parser)
    add = parser.add_argument
    add("--split", type=str, default="test", metavar="NAME", help="part of the data set (default: %(default)s)")
    names = "some by name, standard (fifteen) or all (nineteen)"
    add("--corruption", type=str, nargs="+", default=[], metavar="NAME", help=f"corrupt the images: {names}")
    add("--domain", type=str, nargs="+", default=[], metavar="NAME", help=f"published files of the data set: {names}")
    add("--severity", type=int, nargs="+", metavar="N", help="1 to 5 (default: 5; all of them in a gradual stream)")
    add("--frost", type=Path, metavar="FOLDER", help="photographs of frost (default: a texture that is computed)")
    add("--clean", type=str, metavar="NAME|FOLDER", help="images of interludes (default: those before corruption)")
    add("--size", type=PositiveInt, metavar="N", help="side to resize and crop image files to (default: the model's)")
    add("--classes", type=Path, metavar="FILE", help="class names, one a line (default: the model's)")


def _add_scenario_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--scenario",
        type=Literal["single", "continual", "gradual", "mixed"],
        default="single",
        metavar="NAME",
        help="which domain comes when: single, continual, gradual or mixed (default: %(default)s)",
    )
    add(
        "--order",
        type=Literal["shuffled", "given", "correlated"],
        default="shuffled",
        metavar="NAME",
        help="of a domain's samples: shuffled, given or correlated (default: %(default)s)",
    )
    add("--concentration", type=float, metavar="X", help="of correlated labels: the smaller, the longer a class stays")
    add("--imbalance", type=float, metavar="X", help="factor between the most and the least frequent class")
    add("--interlude", type=NonNegativeInt, default=0, metavar="N", help="clean images after each domain")
    add("--samples", type=PositiveInt, metavar="N", help="of each domain, chosen at random (default: all)")
    add(
        "--batch", type=PositiveInt, default=64, metavar="N", help="images that arrive at a time (default: %(default)s)"
    )
    add("--seed", type=NonNegativeInt, default=0, metavar="N", help="of everything random (default: %(default)s)")
    add("--prefetch", type=NonNegativeInt, default=2, metavar="N", help="batches to read ahead (default: %(default)s)")


def evaluate_command(chosen: Namespace) -> int:
    """Evaluate one method on one stream."""
    from ttac.choice import MethodChoice
    from ttac.data.corruptions import corruption_names
    from ttac.data.streams import Scenario
    from ttac.evaluation import EvaluateJob, Measurement, StreamChoice, run_evaluate

    scenario = Scenario(
        chosen.scenario,
        order=chosen.order,
        concentration=chosen.concentration,
        balance=chosen.imbalance,
        interlude=int(chosen.interlude),
        samples=None if chosen.samples is None else int(chosen.samples),
        batch=int(chosen.batch),
        seed=int(chosen.seed),
    )
    stream = StreamChoice(
        data=chosen.data,
        scenario=scenario,
        split=chosen.split,
        corruptions=corruption_names(chosen.corruption),
        domains=corruption_names(chosen.domain),
        severities=None if chosen.severity is None else tuple(chosen.severity),
        frost=chosen.frost,
        clean=chosen.clean,
        prefetch=int(chosen.prefetch),
    )
    options = {"seed": int(chosen.seed), **parse_options(chosen.method, chosen.set)}
    choice = MethodChoice(load_chosen_model(chosen), chosen.method, chosen.preset, options, chosen.stats)
    measurement = Measurement(choice, stream, chosen.protocol, chosen.epochs)
    return run_job(run_evaluate, EvaluateJob(measurement, chosen.out))
