"""Where methods stand in another order than in the paper."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from ttac.benchmark.report.published import MEAN
from ttac.benchmark.report.results import RunResult
from ttac.benchmark.report.tables import Cell, Row, Table
from ttac.benchmark.runs import Part

CLEAR_ERROR = 0.1  # points of error between two published numbers
CLEAR_RATIO = 1.1  # of two times
STANDARD_ERRORS = 2.0
ENOUGH = 5  # domains with the same streams, that their differences say more than counts of errors

RULES = {
    "error": (
        f"Two methods of a protocol are compared where the paper has them at least {CLEAR_ERROR} points apart. Their "
        f"order counts as swapped where ours differ by more than {STANDARD_ERRORS:g} standard errors the other way; "
        "smaller differences are undecided. The standard error is that of the differences on the same streams, with "
        f"one mean over seeds a domain, where there are at least {ENOUGH} domains, else that of the counted errors, or "
        "of the seeds if that is larger. "
        "Means over a part of the domains are not compared."
    ),
    "seconds": (
        "Two methods of a protocol are compared where the paper has one at least "
        f"{CLEAR_RATIO - 1:.0%} slower. Their order counts as swapped where ours has the other one as much slower; "
        "smaller differences are undecided."
    ),
}


class Place(NamedTuple):
    """Where a number stands, and the paper's there."""

    row: Row
    cell: Cell
    published: float


Pair = tuple[str, Place, Place]  # of a column


@dataclass(frozen=True)
class Ordering:
    """How many pairs stand as in the paper, how many are too close to say, and those that do not."""

    same: int
    undecided: int
    swaps: tuple[Pair, ...]  # the first of a pair is better here

    @property
    def compared(self) -> int:
        """Give the number of pairs that the paper tells apart."""
        return self.same + self.undecided + len(self.swaps)


def compare_order(table: Table) -> Ordering:
    """Compare the order of methods with the paper's, by the averages where there are any, else column by column."""
    same = undecided = 0
    swaps: list[Pair] = []
    for column, first, second in _pairs(table):
        if not _apart(table, first.published, second.published):
            continue
        if not _measurably_apart(table, column, first.cell, second.cell):
            undecided += 1
            continue
        ahead, behind = sorted((first, second), key=lambda place: place.cell.mean)
        if ahead.published < behind.published:
            same += 1
        else:
            swaps.append((column, ahead, behind))
    return Ordering(same, undecided, tuple(swaps))


def _pairs(table: Table) -> Iterator[Pair]:
    columns = [MEAN] if table.experiment.average else table.columns
    for group in table.groups:
        for column in columns:
            found = [(row, row.cells[column]) for row in table.of(group) if column in row.cells]
            able = [Place(row, cell, cell.published) for row, cell in found if cell.published is not None]
            yield from ((column, first, second) for first, second in combinations(able, 2))


def _apart(table: Table, a: float, b: float) -> bool:
    if table.experiment.metric == "seconds":
        return max(a, b) >= CLEAR_RATIO * min(a, b)
    return round(abs(a - b), 6) >= CLEAR_ERROR


def _measurably_apart(table: Table, column: str, a: Cell, b: Cell) -> bool:
    if table.experiment.metric == "seconds":
        return _apart(table, a.mean, b.mean)
    differences = [] if table.experiment.by_class else paired_differences(a, b)
    if len(differences) >= ENOUGH:
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        difference = statistics.fmean(differences)
        if (difference < 0) != (a.mean < b.mean):  # seeds that one of them lacks turn the order
            return False
    else:
        classes = len(table.columns) if table.experiment.by_class and column != MEAN else 1
        error = math.hypot(standard_error(a, classes), standard_error(b, classes))
        difference = a.mean - b.mean
    return abs(difference) > STANDARD_ERRORS * error


def paired_differences(a: Cell, b: Cell) -> list[float]:
    """Give the differences in error between two cells, one a domain: the mean over the streams that both saw.

    Seeds of a domain share its images and the source model, so they are no independent differences.
    """
    there = {_stream(done): float(done.record.error or 0.0) for done in b.done}
    by_part: dict[Part, list[float]] = {}
    for done in a.done:
        if _stream(done) in there:
            by_part.setdefault(done.run.part, []).append(float(done.record.error or 0.0) - there[_stream(done)])
    return [statistics.fmean(differences) for differences in by_part.values()]


def _stream(done: RunResult) -> tuple[object, ...]:
    return done.run.column, done.run.part, done.run.seed, done.record.samples


def standard_error(cell: Cell, classes: int = 1) -> float:
    """Give the standard error of a mean error in percent: of counting, or of the seeds where that is larger.

    Seeds see the same images, so the samples of one of them count, or the share of one class of several.
    """
    seeds: dict[int, int] = {}
    for done in cell.done:
        seeds[done.run.seed] = seeds.get(done.run.seed, 0) + done.record.samples
    samples = max(seeds.values()) / classes
    share = cell.mean / 100
    counting = 100 * math.sqrt(share * (1 - share) / samples)
    return max(counting, (cell.std or 0.0) / math.sqrt(cell.n))
