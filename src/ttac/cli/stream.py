"""The arguments of a stream of labelled images, which `ttac evaluate` measures here and `ttac replay` sends."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeInt, PositiveInt

from ttac.cli.common import add_data_argument

if TYPE_CHECKING:
    from ttac.evaluation.evaluate_job import StreamChoice


def add_stream_arguments(parser: ArgumentParser, batch: int, batch_help: str) -> None:
    """Add what names labelled images, and says in which order and under which shifts they come."""
    add_data_argument(parser)
    add = parser.add_argument
    add("--split", type=str, default="test", metavar="NAME", help="part of the data set (default: %(default)s)")
    names = "some by name, standard (fifteen) or all (nineteen)"
    add("--corruption", type=str, nargs="+", default=[], metavar="NAME", help=f"corrupt the images: {names}")
    add("--domain", type=str, nargs="+", default=[], metavar="NAME", help=f"published files of the data set: {names}")
    add("--severity", type=int, nargs="+", metavar="N", help="1 to 5 (default: 5; all of them in a gradual stream)")
    add("--frost", type=Path, metavar="FOLDER", help="photographs of frost (default: a texture that is computed)")
    add("--clean", type=str, metavar="NAME|FOLDER", help="images of interludes (default: those before corruption)")
    add("--classes", type=Path, metavar="FILE", help="class names, one a line (default: the model's)")
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
    add("--batch", type=PositiveInt, default=batch, metavar="N", help=f"{batch_help} (default: %(default)s)")
    add("--seed", type=NonNegativeInt, default=0, metavar="N", help="of everything random (default: %(default)s)")
    add("--prefetch", type=NonNegativeInt, default=2, metavar="N", help="batches to read ahead (default: %(default)s)")


def chosen_stream(chosen: Namespace) -> StreamChoice:
    """Give the stream that `add_stream_arguments` names."""
    from ttac.data.corruptions import corruption_names
    from ttac.data.streams import Scenario
    from ttac.evaluation.evaluate_job import StreamChoice

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
    return StreamChoice(
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
