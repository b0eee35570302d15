"""`ttac methods`."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from ttac.cli.common import new_parser

if TYPE_CHECKING:
    from ttac.methods.base import Adapter


def methods_parser() -> ArgumentParser:
    """Describe `ttac methods`."""
    parser = new_parser("List the methods: where each may run, what it needs, what it changes, when it predicts.")
    parser.add_argument("--verbose", action="store_true", help="cite their papers too")
    parser.add_argument("--json", action="store_true", help="print JSON, with everything")
    return parser


def methods_command(chosen: Namespace) -> int:
    """Print the capabilities of all registered methods."""
    from rich.console import Console
    from rich.table import Table

    from ttac.evaluation.protocols import PROTOCOLS
    from ttac.methods.registry import methods

    rows = [_row(method) for method in methods().values()]
    if chosen.json:
        print(json.dumps(rows, indent=2))
        return 0
    console = Console()
    table = Table()
    for heading in ("method", "protocols", "needs", "changes", "predicts"):
        table.add_column(heading, no_wrap=heading == "method")
    for row in rows:
        protocols = "all" if len(row["protocols"]) == len(PROTOCOLS) else ", ".join(row["protocols"])
        needs = ", ".join([*row["needs"], *(f"under Y {branch}" for branch in row["may_use"])])
        table.add_row(row["method"], protocols, needs or "-", row["changes"], row["predicts"])
    console.print(table, markup=False)
    if chosen.verbose:
        for row in rows:
            console.print(f"{row['method']}: {row['citation']}", markup=False, soft_wrap=True)
    return 0


def _row(method: type[Adapter]) -> dict[str, Any]:
    able = method.capabilities
    moments = {option.name: option.default for option in dataclasses.fields(method.options_type)}
    return {
        "method": able.name,
        "title": able.title,
        "protocols": able.protocols,
        "needs": able.needs,
        "may_use": able.may_use,
        "changes": able.changes,
        "predicts": str(moments.get("predict", "-")),
        "citation": able.citation,
    }
