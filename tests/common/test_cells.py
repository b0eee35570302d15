"""Cells of CSV: each text comes back as it was, and none is a formula."""

from __future__ import annotations

import csv
import io
import itertools

from ttac.common.cells import csv_line, neutral, original

TEXTS = ["".join(marks) for length in range(5) for marks in itertools.product("'=+-@\t\r\na5.,", repeat=length)]


def is_number(text: str) -> bool:
    try:
        return text.strip() == text and float(text) is not None
    except ValueError:
        return False


def test_no_text_is_a_formula_and_each_comes_back() -> None:
    for text in TEXTS:
        cell = neutral(text)
        assert original(cell) == text
        assert len(cell) == 1 or not cell.startswith(tuple("=+-@\t\r\n")) or is_number(cell), repr(text)
    assert len({neutral(text) for text in TEXTS}) == len(TEXTS)


def test_lines_are_read_back_by_any_reader() -> None:
    text = "".join(csv_line(text, -0.5, 7, None) for text in TEXTS)
    rows = list(csv.reader(io.StringIO(text, newline="")))
    assert [original(row[0]) for row in rows] == TEXTS
    assert {tuple(row[1:]) for row in rows} == {("-0.5", "7", "")}
