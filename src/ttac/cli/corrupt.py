"""`ttac corrupt`."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeInt, PositiveInt

from ttac.cli.common import add_part_arguments, new_parser, run_job


def corrupt_parser() -> ArgumentParser:
    """Describe `ttac corrupt`."""
    parser = new_parser(
        "Write a data set under corruptions in CIFAR-C's layout, five severities in a file; the same command goes on."
    )
    add_part_arguments(parser)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FOLDER", help="where the arrays and their record go")
    add(
        "--corruptions",
        type=str,
        nargs="+",
        default=["standard"],
        metavar="NAME",
        help="some by name, standard (fifteen) or all (nineteen) (default: standard)",
    )
    add("--seed", type=NonNegativeInt, default=0, metavar="N", help="of all noise and texture (default: %(default)s)")
    add("--frost", type=Path, metavar="FOLDER", help="photographs of frost (default: a texture that is computed)")
    add("--size", type=PositiveInt, metavar="N", help="side to resize and crop image files to (default: as they are)")
    add("--batch", type=PositiveInt, default=500, metavar="N", help="images at a time (default: %(default)s)")
    add("--device", type=str, default="cpu", metavar="NAME", help="cpu, cuda, ... (default: %(default)s)")
    return parser


def corrupt_command(chosen: Namespace) -> int:
    """Write the arrays."""
    from ttac.data.corruptions import corruption_names
    from ttac.data.corruptions.job import CorruptJob, run_corrupt

    job = CorruptJob(
        data=chosen.data,
        out=chosen.out,
        corruptions=corruption_names(chosen.corruptions),
        seed=int(chosen.seed),
        frost=chosen.frost,
        split=chosen.split,
        samples=None if chosen.samples is None else int(chosen.samples),
        size=None if chosen.size is None else int(chosen.size),
        batch=int(chosen.batch),
        device=chosen.device,
    )
    return run_job(run_corrupt, job)
