"""The tables of the TTAC++ paper as data, each with its place there, to stand beside what was measured.

They are in `published/`, one file a table, whose keys are the fields of `PublishedTable`. Where the paper leaves open
what a number belongs to, such as its protocol, the table's note says what was taken.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

MEAN = "mean"  # the column of the averages
NO_PROTOCOL = "-"  # the group of what is not adapted


@dataclass(frozen=True)
class PublishedRow:
    """One line of a table: a method or a variant under a protocol."""

    group: str  # the protocol
    row: str
    values: tuple[float | None, ...]  # one a column; None where the paper has none
    average: float | None = None  # as printed
    spread: float | None = None  # the standard deviation, as printed


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

    @property
    def number(self) -> int:
        """Give its number in the paper."""
        return int(self.place.removeprefix("Table ").partition(",")[0])

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
    tables = [_read(file.name.removesuffix(".json"), file.read_text("utf-8")) for file in folder.iterdir()]
    return {table.name: table for table in sorted(tables, key=lambda table: (table.number, table.name))}


def _read(name: str, text: str) -> PublishedTable:
    content = json.loads(text)
    rows = tuple(PublishedRow(**{**row, "values": tuple(row["values"])}) for row in content["rows"])
    return PublishedTable(**{**content, "name": name, "columns": tuple(content["columns"]), "rows": rows})
