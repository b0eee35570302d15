"""`ttac data`."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from ttac.cli.common import new_parser

if TYPE_CHECKING:
    from ttac.data.sets.spec import DatasetSpec


def _add_root(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--root", type=Path, metavar="FOLDER", help="where data sets are (default: $TTAC_DATA, or the user's cache)"
    )


def list_parser() -> ArgumentParser:
    """Describe `ttac data list`."""
    parser = new_parser("List the data sets that have a name, and which of them are here.")
    _add_root(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, with everything")
    return parser


def fetch_parser() -> ArgumentParser:
    """Describe `ttac data fetch`."""
    parser = new_parser("Download a data set from its authors, check it and unpack it; the same command goes on.")
    add = parser.add_argument
    add("name", type=str, metavar="NAME", help="see `ttac data list`")
    _add_root(parser)
    add(
        "--mirror",
        type=str,
        action="append",
        default=[],
        metavar="URL",
        help="address of a folder with the same files, tried before the authors'; can be repeated",
    )
    add(
        "--only",
        type=str,
        action="append",
        default=[],
        metavar="FILE",
        help="this file alone, also one that is not needed; can be repeated",
    )
    add("--keep-archive", action="store_true", help="do not delete archives after unpacking")
    return parser


def check_parser() -> ArgumentParser:
    """Describe `ttac data check`."""
    parser = new_parser("Read a data set's files and say which are whole; the exit code is 1 if one is not.")
    parser.add_argument("name", type=str, metavar="NAME", help="or NAME=PATH for a data set that is elsewhere")
    _add_root(parser)
    return parser


def list_command(chosen: Namespace) -> int:
    """Print the registered data sets."""
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    from ttac.data.sets import data_root
    from ttac.data.sets.specs import SPECS

    root = data_root(chosen.root)
    rows = [_row(spec, root) for spec in SPECS.values()]
    if chosen.json:
        print(json.dumps(rows, indent=2))
        return 0
    table = Table()
    for heading in ("name", "what", "classes", "size", "here", "to fetch"):
        table.add_column(heading, no_wrap=heading != "what", justify="right" if heading == "classes" else "left")
    for row in rows:
        fetched = decimal(row["bytes"]) if row["bytes"] else "-"
        here = "yes" if row["path"] else "no"
        height, width = row["size"]
        table.add_row(row["name"], row["title"], str(row["classes"]), f"{height} x {width}", here, fetched)
    console = Console()
    console.print(table)
    console.print(f"looked for in {root}; folders and arrays of your own are named by their path", markup=False)
    return 0


def _row(spec: DatasetSpec, root: Path) -> dict[str, Any]:
    return {
        "name": spec.name,
        "title": spec.title,
        "classes": spec.num_classes,
        "size": spec.size,
        "channels": spec.channels,
        "images": dict(spec.counts),
        "domains": [*spec.domains, *spec.extra_domains],
        "severities": spec.severities,
        "mean": spec.mean,
        "std": spec.std,
        "presets": list(spec.presets),
        "path": _place(spec, root),
        "bytes": sum(file.size or 0 for file in spec.files if not file.optional),
        "files": [file.url for file in spec.files],
        "citation": spec.citation,
        "terms": spec.terms,
    }


def _place(spec: DatasetSpec, root: Path) -> str | None:
    from ttac.data.sets import find_data

    if spec.package is not None:
        found = find_spec(spec.package)
        return None if found is None else found.origin
    try:
        return str(find_data(spec.name, root).path)
    except FileNotFoundError:
        return None


def fetch_command(chosen: Namespace) -> int:
    """Download a data set."""
    from rich.console import Console

    from ttac.data.sets import data_root
    from ttac.data.sets.fetch import fetch
    from ttac.data.sets.specs import get_spec

    try:
        whole = fetch(
            get_spec(chosen.name),
            data_root(chosen.root),
            Console(),
            mirrors=chosen.mirror,
            only=chosen.only,
            keep_archives=chosen.keep_archive,
        )
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the same command goes on from there\n")
        return 130
    return 0 if whole else 1


def check_command(chosen: Namespace) -> int:
    """Check a data set."""
    from rich.console import Console

    from ttac.data.sets import data_root, find_data
    from ttac.data.sets.check import check_data
    from ttac.data.sets.fetch import repair
    from ttac.data.sets.specs import SPECS, get_spec

    name = chosen.name.partition("=")[0]
    if name not in SPECS and Path(chosen.name).exists():
        raise ValueError(
            f"say which data set {chosen.name} is to be: NAME={chosen.name}, with a NAME of `ttac data list`"
        )
    get_spec(name)
    root = data_root(chosen.root)
    try:
        found = find_data(chosen.name, root)
    except FileNotFoundError as error:
        sys.stderr.write(f"missing: {error}\n")
        return 1
    console = Console(soft_wrap=True)
    console.print(f"{name} in {found.path}", markup=False)
    findings = []
    for finding in check_data(found, root / name):
        console.print(f"{finding.state:10} {finding.name}: {finding.detail}", markup=False, highlight=False)
        findings.append(finding)
    wrong = [finding for finding in findings if finding.state in ("missing", "damaged")]
    if wrong:
        result = f"not whole: {len(wrong)} of {len(findings)} parts are missing or damaged{repair(found, root, wrong)}"
    else:
        result = "whole"
    console.print(f"{name} is {result}", markup=False)
    return 1 if wrong else 0
