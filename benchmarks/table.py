"""Prints rows as a table and writes them as JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from timing import Row

from ttac.common.environment import environment
from ttac.common.files import write_json

Measure = Callable[..., list[Row]]


def show(rows: list[Row]) -> None:
    """Print one line a row: what was measured, the figure, what it must be, whether it is."""
    table = Table("figure", "measured", "must be", "", "how")
    for row in rows:
        bound = "" if row.bound is None else f"{row.bound[0]} {_number(row.bound[1])} {row.unit}"
        mark = {True: "[green]yes[/]", False: "[red]NO[/]", None: ""}[row.met]
        table.add_row(escape(row.name), f"{_number(row.value)} {row.unit}", bound, mark, escape(row.note))
    Console(width=160).print(table)


def write(rows: list[Row], out: Path, **details: Any) -> None:
    """Write rows with what produced them, and details that they sum up."""
    found = [{**asdict(row), "met": row.met} for row in rows]
    write_json(out, {"rows": found, **details, "threads": torch.get_num_threads(), "environment": environment()})


def run(*measures: Measure) -> None:
    """Be the command line of one or several benchmarks."""

    def main(threads: int = 2, out: Path | None = None) -> None:
        """Measure and print a table.

        Args:
            threads: of torch.
            out: JSON file for the figures.
        """
        torch.set_num_threads(threads)
        rows: list[Row] = []
        for measure in measures:
            torch.manual_seed(0)
            found = measure(threads=threads)
            show(found)
            rows += found
            if out is not None:
                write(rows, out)

    auto_cli(main, as_positional=False)


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
