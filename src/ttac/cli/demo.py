"""`ttac demo`."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeInt

from ttac.cli.common import new_parser


def demo_parser() -> ArgumentParser:
    """Describe `ttac demo`."""
    parser = new_parser("Train a small network, shift its test images, adapt to them, and report.")
    add = parser.add_argument
    add("--out", type=Path, default=Path("out/demo"), metavar="FOLDER", help="report (default: %(default)s)")
    add("--seed", type=NonNegativeInt, default=0, metavar="N", help="of everything random (default: %(default)s)")
    add("--cache", type=Path, metavar="FOLDER", help="keeps the trained network (default: the user's cache)")
    return parser


def demo_command(chosen: Namespace) -> int:
    """Run the demo."""
    from ttac.benchmark.demo import run_demo

    run_demo(chosen.out, chosen.seed, cache=chosen.cache)
    return 0
