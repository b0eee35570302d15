"""`ttac evaluate`."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import PositiveInt

from ttac.cli.adapt import add_method_arguments, parse_options
from ttac.cli.common import add_model_arguments, add_speed_arguments, load_chosen_model, new_parser, run_job
from ttac.cli.stream import add_stream_arguments, chosen_stream


def evaluate_parser() -> ArgumentParser:
    """Describe `ttac evaluate`."""
    parser = new_parser("Measure a method on a stream of labelled images, which it never sees the labels of.")
    add_model_arguments(parser)
    add_speed_arguments(parser)
    add_method_arguments(parser)
    add_stream_arguments(parser, batch=64, batch_help="images that arrive at a time")
    add = parser.add_argument
    add("--size", type=PositiveInt, metavar="N", help="side to resize and crop image files to (default: the model's)")
    add("--protocol", type=str, default="N-O-SF", metavar="NAME", help="what is allowed (default: %(default)s)")
    add("--epochs", type=PositiveInt, metavar="N", help="passes of the multi-pass protocols (default: 3)")
    add("--out", type=Path, required=True, metavar="FILE", help="record to write; one that is there is not replaced")
    return parser


def evaluate_command(chosen: Namespace) -> int:
    """Evaluate one method on one stream."""
    from ttac.evaluation.evaluate_job import EvaluateJob, Measurement, run_evaluate
    from ttac.evaluation.method_choice import MethodChoice

    stream = chosen_stream(chosen)
    options = {"seed": int(chosen.seed), **parse_options(chosen.method, chosen.set)}
    choice = MethodChoice(load_chosen_model(chosen), chosen.method, chosen.preset, options, chosen.stats)
    measurement = Measurement(choice, stream, chosen.protocol, chosen.epochs)
    return run_job(run_evaluate, EvaluateJob(measurement, chosen.out))
