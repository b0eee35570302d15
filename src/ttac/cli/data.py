"""`ttac data`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttac.common.options import Checked, setting

if TYPE_CHECKING:
    from rich.console import Console

    from ttac.data.sets.spec import DatasetSpec

ROOT = "where data sets are (default: $TTAC_DATA, or the user's cache)"


@dataclass(frozen=True)
class ListJob(Checked):
    """List the data sets that have a name, and which of them are here."""

    root: Path | None = setting(None, ROOT)
    json: bool = setting(False, "print JSON, with everything")


@dataclass(frozen=True)
class FetchJob(Checked):
    """Download a data set from its authors, check it and unpack it; the same command goes on."""

    name: str = setting(help="see `ttac data list`", positional=True)
    root: Path | None = setting(None, ROOT, output="folder")
    mirror: tuple[str, ...] = setting(
        (), "address of a folder with the same files, tried before the authors'; can be repeated", action="append"
    )
    only: tuple[str, ...] = setting((), "this file alone, needed or not; can be repeated", action="append")
    keep_archive: bool = setting(False, "do not delete archives after unpacking")


@dataclass(frozen=True)
class CheckJob(Checked):
    """Read a data set's files and say which are whole; the exit code is 1 if one is not."""

    name: str = setting(help="or NAME=PATH for a data set that is elsewhere", positional=True)
    root: Path | None = setting(None, ROOT)


def list_data(job: ListJob, console: Console) -> None:
    """Print the registered data sets."""
    from rich.filesize import decimal
    from rich.table import Table

    from ttac.data.sets import data_root
    from ttac.data.sets.specs import SPECS

    root = data_root(job.root)
    rows = [_row(spec, root) for spec in SPECS.values()]
    if job.json:
        print(json.dumps(rows, indent=2))
        return
    table = Table()
    for heading in ("name", "what", "classes", "size", "here", "to fetch"):
        table.add_column(heading, no_wrap=heading != "what", justify="right" if heading == "classes" else "left")
    for row in rows:
        fetched = decimal(row["bytes"]) if row["bytes"] else "-"
        here = "yes" if row["path"] else "no"
        height, width = row["size"]
        table.add_row(row["name"], row["title"], str(row["classes"]), f"{height} x {width}", here, fetched)
    console.print(table, soft_wrap=False)
    console.print(f"looked for in {root}; folders and arrays of your own are named by their path", markup=False)


def _row(spec: DatasetSpec, root: Path) -> dict[str, Any]:
    own = ("name", "title", "size", "channels", "severities", "mean", "std", "citation", "terms")
    return {
        **{field: getattr(spec, field) for field in own},
        "classes": spec.num_classes,
        "images": dict(spec.counts),
        "domains": [*spec.domains, *spec.extra_domains],
        "path": _place(spec, root),
        "bytes": sum(file.size or 0 for file in spec.files if not file.optional),
        "files": [file.url for file in spec.files],
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


def fetch_data(job: FetchJob, console: Console) -> int:
    """Download a data set."""
    from ttac.data.sets import data_root
    from ttac.data.sets.fetch import fetch
    from ttac.data.sets.specs import get_spec

    try:
        spec, root = get_spec(job.name), data_root(job.root)
        whole = fetch(spec, root, console, mirrors=job.mirror, only=job.only, keep_archives=job.keep_archive)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the same command goes on from there\n")
        return 130
    return 0 if whole else 1


def check_data(job: CheckJob, console: Console) -> int:
    """Check a data set."""
    from ttac.data.sets import data_root, find_data
    from ttac.data.sets.check import report
    from ttac.data.sets.specs import SPECS, get_spec

    name = job.name.partition("=")[0]
    if name not in SPECS and Path(job.name).exists():
        raise ValueError(f"say which data set {job.name} is to be: NAME={job.name}, with a NAME of `ttac data list`")
    get_spec(name)
    root = data_root(job.root)
    try:
        found = find_data(job.name, root)
    except FileNotFoundError as error:
        sys.stderr.write(f"missing: {error}\n")
        return 1
    return 0 if report(found, root, console) else 1
