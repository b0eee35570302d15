"""The tables of the TTAC++ paper as data, each with its place there, to stand beside what was measured.

They are in `published/`, one file a table: see `read_table` for its keys. Where the paper leaves open what a number
belongs to, such as its protocol, the table's note says what was taken.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from ttac.evaluation.protocols import PROTOCOLS

MEAN = "mean"  # the column of the averages
NO_PROTOCOL = "-"  # the group of what is not adapted
_LARGEST = {"error": 100, "seconds": 3600}  # by metric; an hour a sample would be a slip
_PLACE = re.compile(r"Table [1-9]\d*, tab:\w+")


@dataclass(frozen=True)
class PublishedRow:
    """One line of a table: a method or a variant under a protocol."""

    group: str  # the protocol
    row: str
    values: tuple[float | None, ...]  # one a column; None where the paper has none
    average: float | None  # as printed
    spread: float | None  # the standard deviation, as printed


@dataclass(frozen=True)
class PublishedTable:
    """One table of the paper, or one half of it."""

    name: str
    title: str  # the caption
    place: str  # "Table 5, tab:visda": its number in the order of the paper's source, its label there
    metric: str  # "error" in percent, or "seconds" a sample
    columns: tuple[str, ...]
    rows: tuple[PublishedRow, ...]
    note: str

    def value(self, group: str, row: str, column: str) -> float | None:
        """Give the number of a cell, the printed average for the column "mean", None where the paper has none.

        >>> table = published_tables()["imagenet-c"]
        >>> table.value("N-O-SL", "TTAC++", "fog"), table.value("N-O-SL", "TTAC++", "mean")
        (32.97, 45.66)
        >>> table.value("N-O-SL", "BN", "fog") is None
        True
        """
        for line in self.rows:
            if (line.group, line.row) == (group, row):
                return dict(zip((*self.columns, MEAN), (*line.values, line.average), strict=True)).get(column)
        return None


@cache
def published_tables() -> Mapping[str, PublishedTable]:
    """Give the paper's tables by name, in the paper's order.

    >>> published_tables()["visda"].place
    'Table 5, tab:visda'
    """
    folder = files("ttac.benchmark.report") / "published"
    tables = [
        read_table(file.name.removesuffix(".json"), file.read_text("utf-8"))
        for file in folder.iterdir()
        if file.name.endswith(".json")
    ]
    return MappingProxyType({table.name: table for table in sorted(tables, key=_order)})


def read_table(name: str, text: str) -> PublishedTable:
    """Read a table from JSON, or raise an error that says what is wrong with it.

    >>> table = {"title": "Protocols", "place": "Table 3, tab:p", "metric": "error", "note": "", "columns": ["C10-C"]}
    >>> row = {"group": "N-O-SF", "row": "BN", "values": [15.49]}  # and "average", "spread" where they are printed
    >>> read_table("protocols", json.dumps({**table, "rows": [row]})).value("N-O-SF", "BN", "C10-C")
    15.49
    """
    try:
        return _table(name, json.loads(text))
    except ValueError as error:
        raise ValueError(f"published table {name!r}: {error}") from error


def _table(name: str, content: Any) -> PublishedTable:
    _check_keys("the table", content, ("title", "place", "metric", "note", "columns", "rows"))
    for key in ("title", "place", "metric"):
        _check_text(key, content[key])
    if not isinstance(content["note"], str):
        raise ValueError(f"note is {content['note']!r}, not a text")
    if not _PLACE.fullmatch(content["place"]):
        raise ValueError(f"place is {content['place']!r}, not of the form 'Table 3, tab:label'")
    if content["metric"] not in _LARGEST:
        raise ValueError(f"metric is {content['metric']!r}, not one of {', '.join(_LARGEST)}")
    for key in ("columns", "rows"):
        if not isinstance(content[key], list) or not content[key]:
            raise ValueError(f"{key} is not a list with something in it")
    for column in content["columns"]:
        _check_text("a column", column)
    _check_unique("columns", [*content["columns"], MEAN])
    rows = [_row(row, len(content["columns"]), _LARGEST[content["metric"]]) for row in content["rows"]]
    _check_unique("rows", [(row.group, row.row) for row in rows])
    return PublishedTable(**{**content, "name": name, "columns": tuple(content["columns"]), "rows": tuple(rows)})


def _row(content: Any, columns: int, largest: int) -> PublishedRow:
    _check_keys("a row", content, ("group", "row", "values"), ("average", "spread"))
    for key in ("group", "row"):
        _check_text(key, content[key])
    where = f"row {content['row']!r} of {content['group']!r}"
    if content["group"] != NO_PROTOCOL and content["group"] not in PROTOCOLS:
        raise ValueError(f"{where}: the group is no protocol; choose from {', '.join(PROTOCOLS)} or {NO_PROTOCOL!r}")
    if not isinstance(content["values"], list) or len(content["values"]) != columns:
        raise ValueError(f"{where}: values is not a list of {columns} numbers, one a column")
    average, spread = content.get("average"), content.get("spread")
    for value in (*content["values"], average, spread):
        # A comparison with NaN is false.
        if value is not None and not (type(value) in (int, float) and 0 <= value <= largest):
            raise ValueError(f"{where}: {value!r} is not a number from 0 to {largest}")
    return PublishedRow(content["group"], content["row"], tuple(content["values"]), average, spread)


def _check_keys(what: str, content: Any, needed: Sequence[str], optional: Sequence[str] = ()) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"{what} is not an object with keys")
    if missing := [key for key in needed if key not in content]:
        raise ValueError(f"{what} lacks {', '.join(missing)}")
    if unknown := [key for key in content if key not in (*needed, *optional)]:
        raise ValueError(f"{what} has unknown keys: {', '.join(unknown)}")


def _check_text(what: str, value: Any) -> None:
    if not isinstance(value, str) or not value or value != value.strip():
        raise ValueError(f"{what} is {value!r}, not a text without spaces around it")


def _check_unique(what: str, names: Sequence[Any]) -> None:
    if twice := sorted({str(name) for name in names if names.count(name) > 1}):
        raise ValueError(f"{what} are there twice: {', '.join(twice)}")


def _order(table: PublishedTable) -> tuple[int, str]:
    return int(table.place.removeprefix("Table ").split(",")[0]), table.name
