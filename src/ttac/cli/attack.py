"""`ttac attack`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeInt, PositiveInt

from ttac.cli.common import add_model_arguments, add_part_arguments, load_chosen_model, new_parser, run_job


def attack_parser() -> ArgumentParser:
    """Describe `ttac attack`."""
    parser = new_parser(
        "Write a data set that deceives a model, by projected gradient descent; the same command goes on."
    )
    add_model_arguments(parser)
    add_part_arguments(parser)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FOLDER", help="where the images, labels and record go")
    add(
        "--norm",
        type=Literal["linf", "l2"],
        default="linf",
        metavar="NAME",
        help="linf (each value) or l2 (whole image) (default: %(default)s)",
    )
    add("--eps", type=str, metavar="X", help="largest change, pixels in [0, 1] (default: 8/255, 0.5 with l2)")
    add("--step", type=str, metavar="X", help="length of a step (default: 0.01, 0.1 with l2)")
    add("--steps", type=PositiveInt, default=40, metavar="N", help="steps an image (default: %(default)s)")
    add("--no-random-start", action="store_true", help="start at the clean image, not somewhere in the ball")
    add("--seed", type=NonNegativeInt, default=0, metavar="N", help="of the random start (default: %(default)s)")
    add("--batch", type=PositiveInt, default=256, metavar="N", help="images at a time (default: %(default)s)")
    return parser


def number(text: str) -> float:
    """Read a decimal number or a fraction.

    >>> number("8/255") == 8 / 255, number("0.01")
    (True, 0.01)
    """
    numerator, slash, denominator = text.partition("/")
    try:
        return float(numerator) / (float(denominator) if slash else 1)
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"expected a number or a fraction such as 8/255, not {text!r}") from error


def attack_command(chosen: Namespace) -> int:
    """Write the images."""
    from ttac.data.attacks import USUAL, PGDOptions
    from ttac.data.attacks.job import AttackJob, run_attack

    eps, step = USUAL[chosen.norm]
    options = PGDOptions(
        norm=chosen.norm,
        eps=eps if chosen.eps is None else number(chosen.eps),
        step=step if chosen.step is None else number(chosen.step),
        steps=int(chosen.steps),
        random_start=not chosen.no_random_start,
        seed=int(chosen.seed),
    )
    job = AttackJob(
        model=load_chosen_model(chosen),
        data=chosen.data,
        out=chosen.out,
        options=options,
        split=chosen.split,
        samples=None if chosen.samples is None else int(chosen.samples),
        batch=int(chosen.batch),
    )
    return run_job(run_attack, job)
