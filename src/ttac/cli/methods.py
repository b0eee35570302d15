"""`ttac methods`."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ttac.common.options import Checked, setting

if TYPE_CHECKING:
    from rich.console import Console

    from ttac.adaptation.method import Method


@dataclass(frozen=True)
class MethodsJob(Checked):
    """List the methods: where each may run, what it needs, what it changes, when it predicts."""

    method: tuple[str, ...] = setting((), "those alone, by name or as path/to/file.py:Class", positional=True)
    verbose: bool = setting(False, "tell their papers, presets and options with defaults too")
    json: bool = setting(False, "print JSON, with everything")


def list_methods(job: MethodsJob, console: Console) -> None:
    """Print the capabilities of the methods."""
    from rich.table import Table

    from ttac.evaluation.protocols import PROTOCOLS
    from ttac.methods.registry import find_method, methods

    rows = [_row(find_method(name)) for name in job.method or methods()]
    if job.json:
        print(json.dumps(rows, indent=2, default=str))
        return
    table = Table()
    for heading in ("method", "protocols", "needs", "changes", "predicts"):
        table.add_column(heading, no_wrap=heading == "method")
    for row in rows:
        protocols = "all" if len(row["protocols"]) == len(PROTOCOLS) else ", ".join(row["protocols"])
        needs = ", ".join([*row["needs"], *(f"under Y {branch}" for branch in row["may_use"])])
        table.add_row(row["method"], protocols, needs or "-", row["changes"], row["predicts"])
    console.print(table, markup=False, soft_wrap=False)
    if job.verbose:
        for row in rows:
            console.print(f"{row['method']}: {row['citation']}", markup=False)
            if row["presets"]:
                console.print(f"  presets: {', '.join(row['presets'])}", markup=False)
            for name, option in row["options"].items():
                console.print(f"  {name} = {option['default']}: {option['help']}", markup=False, highlight=False)


def _row(method: type[Method]) -> dict[str, Any]:
    able = method.capabilities
    defaults = method.options_type()
    options = {
        option.name: {"default": getattr(defaults, option.name), "help": option.metadata.get("help", "")}
        for option in dataclasses.fields(defaults)
    }
    return {
        "method": able.name,
        **{field: getattr(able, field) for field in ("title", "protocols", "needs", "may_use", "changes", "citation")},
        "predicts": str(options.get("predict", {}).get("default", "-")),
        "presets": {name: dict(preset) for name, preset in method.presets.items()},
        "options": options,
    }
