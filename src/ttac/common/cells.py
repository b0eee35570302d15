"""Lines of CSV that a spreadsheet takes for texts and numbers, and never for formulas.

A text that begins like a formula, with = + - @, a tab or a line break and something behind it, gets an apostrophe in
front, which `original` takes away again. Numbers are none, also those that are written as texts.
"""

from __future__ import annotations

import csv
import io
import re

_FORMULA = re.compile(r"'*[=+\-@\t\r\n].", re.DOTALL)  # with apostrophes too, so that none is lost
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?")


def csv_line(*cells: object) -> str:
    r"""Write one line.

    >>> csv_line("=1+1.png", "a,b", -0.5, "-0.5")
    '\'=1+1.png,"a,b",-0.5,-0.5\n'
    """
    line = io.StringIO()  # which quotes the marks of its own line ends alone, so these are both
    row = [neutral(cell) if isinstance(cell, str) else cell for cell in cells]
    csv.writer(line, lineterminator="\r\n").writerow(row)
    return line.getvalue().removesuffix("\r\n") + "\n"


def neutral(text: str) -> str:
    """Give a text as it stands in a cell."""
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else text


def original(cell: str) -> str:
    """Give the text that `neutral` made a cell of.

    >>> [original(neutral(text)) for text in ("@a", "'@a", "'a", "-1")]
    ['@a', "'@a", "'a", '-1']
    """
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell
