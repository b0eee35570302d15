"""Tables from records: a cell is a mean over seeds, with its spread, its records and what the paper has there."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ttac.benchmark.report.published import MEAN, NO_PROTOCOL, PublishedTable
from ttac.benchmark.report.results import ExperimentResults, RunResult
from ttac.benchmark.runs import Part, PlannedRun
from ttac.common.lookup import pick
from ttac.data.corruptions.constants import NAMES
from ttac.methods.registry import methods

DIGITS = {"error": 2, "seconds": 4, "update": 4}
UNITS = {"error": "error (%)", "seconds": "seconds a sample", "update": "seconds an update"}


@dataclass
class Cell:
    """One number of a table: for each seed the mean over domains, then the mean over seeds.

    What stands beside it is filled in when all cells of the table are there.
    """

    values: Mapping[int | str, float]  # by seed; by column in an average of columns that have no seed in common
    done: tuple[RunResult, ...]
    lacking: str = ""  # what a whole mean would be over
    over: str = "seeds"
    published: float | None = None
    published_std: float | None = None
    best: bool = False

    @property
    def mean(self) -> float:
        """Give the mean over seeds."""
        return statistics.fmean(self.values.values())

    @property
    def std(self) -> float | None:
        """Give the sample standard deviation over seeds, None of one."""
        return statistics.stdev(self.values.values()) if self.n > 1 else None

    @property
    def n(self) -> int:
        """Give the number of seeds."""
        return len(self.values)

    @property
    def whole(self) -> bool:
        """Tell whether the mean is over all that it should be over."""
        return not self.lacking


@dataclass(frozen=True)
class Row:
    """One method of a group; a column that has no record is not among the cells."""

    group: str
    title: str
    cells: dict[str, Cell]

    @property
    def seeds(self) -> str:
        """Give the number of seeds, as a range where it differs between cells."""
        return as_range(cell.n for column, cell in self.cells.items() if column != MEAN)

    @property
    def whole_cells(self) -> dict[str, Cell]:
        """Give the cells whose mean is over all that it should be over."""
        return {column: cell for column, cell in self.cells.items() if cell.whole}

    @property
    def sources(self) -> set[str]:
        """Give the source models of its runs."""
        return {done.run.source for cell in self.cells.values() for done in cell.done}


@dataclass(frozen=True)
class Table:
    """The table of an experiment at a scale."""

    experiment: ExperimentResults
    columns: tuple[str, ...]  # the average is the last, where there is one
    rows: tuple[Row, ...]
    sources: tuple[PublishedTable, ...]  # of the published numbers

    @property
    def groups(self) -> list[str]:
        """Give the groups in their order."""
        return list(dict.fromkeys(row.group for row in self.rows))

    @property
    def digits(self) -> int:
        """Give the decimal places of its numbers."""
        return 2 if self.experiment.against is not None else DIGITS[self.experiment.metric]

    @property
    def unit(self) -> str:
        """Say what its numbers are."""
        against, metric = self.experiment.against, self.experiment.metric
        if against is None:
            return UNITS[metric]
        title = methods()[against].capabilities.title if against in methods() else against
        return f"points of error above {title}" if metric == "error" else f"{UNITS[metric]}, in multiples of {title}'s"

    @property
    def compared(self) -> bool:
        """Tell whether any number has one of the paper beside it."""
        return any(cell.published is not None for row in self.rows for cell in row.cells.values())

    def of(self, group: str) -> list[Row]:
        """Give the rows of a group."""
        return [row for row in self.rows if row.group == group]

    def with_reference(self, group: str) -> list[Row]:
        """Give the rows of a group, after those without adaptation of the same source models, to compare with."""
        own = self.of(group)
        titles = {row.title for row in own}
        sources = set().union(*(row.sources for row in own))
        without = [row for row in self.of(NO_PROTOCOL) if group != NO_PROTOCOL and row.title not in titles]
        return [*(row for row in without if row.sources & sources), *own]


def as_range(counts: Iterable[int]) -> str:
    """Write how many there are, as a range where it differs.

    >>> as_range([3, 3]), as_range([5, 3, 4])
    ('3', '3-5')
    """
    found = sorted(set(counts))
    return str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}"


def make_table(experiment: ExperimentResults, published: Mapping[str, PublishedTable]) -> Table:
    """Lay the records of an experiment out, with the best of each column and group marked."""
    sources = tuple(pick(name, published, f"published table of {experiment.key}") for name in experiment.published)
    by_run = dict.fromkeys(run.column for run in experiment.places)
    columns = tuple(experiment.class_names if experiment.by_class else by_run)
    places: dict[tuple[str, str], list[RunResult]] = {(run.group, run.row): [] for run in experiment.places}
    for done in experiment.done:
        places[done.run.group, done.run.row].append(done)
    found = [Row(*place, _cells(experiment, columns, done)) for place, done in places.items() if done]
    rows = [row for row in found if row.cells]  # without updates there is no time of one
    for row in rows:
        if experiment.average:
            row.cells[MEAN] = _average(row, columns)
        for column, cell in row.whole_cells.items():  # a mean over a part of the domains is not what the paper has
            _put_published_beside(cell, row, column, columns, sources)
    table = Table(experiment, (*columns, MEAN) if experiment.average else columns, tuple(rows), sources)
    _mark_best(table)
    return table


def _cells(experiment: ExperimentResults, columns: Sequence[str], done: Sequence[RunResult]) -> dict[str, Cell]:
    zero = {_stream_of(each.run): each for each in experiment.done if each.run.method == experiment.against}
    values = [(each, _relative(experiment, each, zero)) for each in done]
    cells = {}
    for column in columns:
        measured = [(each, found[column]) for each, found in values if column in found]
        if measured:
            cells[column] = _cell(measured, _wanted(experiment, done[0].run, column))
    return cells


def _stream_of(run: PlannedRun) -> tuple[object, ...]:
    """Name what a method and the one that it is compared with have in common."""
    return run.column, run.source, run.part, run.seed


def _relative(
    experiment: ExperimentResults, done: RunResult, zero: Mapping[tuple[object, ...], RunResult]
) -> dict[str, float]:
    """Give the numbers of a record by column, in relation to the record of the same stream in `zero` where the table
    is a comparison: points of error above it, or how many times as long. Without such a record there are none."""
    values = values_of(experiment, done)
    if experiment.against is None:
        return values
    base = values_of(experiment, zero[_stream_of(done.run)]) if _stream_of(done.run) in zero else {}
    if experiment.metric == "error":
        return {column: value - base[column] for column, value in values.items() if column in base}
    return {column: value / base[column] for column, value in values.items() if base.get(column)}


def readable(column: str) -> str:
    """Write a corruption as words; other names stay as they are.

    >>> readable("gaussian_noise"), readable("tau_PP 0.5")
    ('gaussian noise', 'tau_PP 0.5')
    """
    return column.replace("_", " ") if column in NAMES else column


def whole_runs(table: Table, row: Row, every_column: bool) -> list[RunResult]:
    """Give the runs behind a row's whole means; with `every_column` none of a row that lacks some of its columns."""
    columns = [column for column in table.columns if column != MEAN]
    cells = [cell for column, cell in row.whole_cells.items() if column != MEAN]
    if every_column and len(cells) < len(columns) and not table.experiment.complete:
        return []
    return list({done.run.name: done for cell in cells for done in cell.done}.values())


def values_of(experiment: ExperimentResults, done: RunResult) -> dict[str, float]:
    """Give the numbers that a record has in its experiment's table, by column."""
    record = done.record
    if not experiment.by_class:
        numbers = {
            "error": float(record.error or 0.0),
            "seconds": record.seconds / record.samples,
            "update": record.update_seconds,
        }
        number = numbers[experiment.metric]
        return {} if number is None else {done.run.column: number}
    errors = zip(experiment.class_names, record.class_error, strict=False)
    return {name: error for name, error in errors if error is not None}


def _wanted(experiment: ExperimentResults, like: PlannedRun, column: str) -> set[Part]:
    """Give the parts of a whole cell in the row of `like`: those of its runs, or, while some runs are missing, those
    that any row is to have in the column."""
    if len(experiment.places) < len(experiment.runs):
        return experiment.parts[like.column if experiment.by_class else column]
    here = [run for run in experiment.places if (run.group, run.row) == (like.group, like.row)]
    return {run.part for run in here if experiment.by_class or run.column == column}


def _cell(measured: Sequence[tuple[RunResult, float]], wanted: set[Part]) -> Cell:
    """Average over parts; seeds that lack a part are left out where another one has all."""
    seeds: dict[int, list[tuple[RunResult, float]]] = {}
    for done, value in measured:
        seeds.setdefault(done.run.seed, []).append((done, value))
    whole = {seed: found for seed, found in seeds.items() if {done.run.part for done, _ in found} >= wanted}
    used = whole or seeds
    lacking = "" if whole else f"{max(map(len, seeds.values()))} of {len(wanted)} domains"
    values: dict[int | str, float] = {seed: statistics.fmean(value for _, value in of) for seed, of in used.items()}
    return Cell(values, tuple(done for found in used.values() for done, _ in found), lacking)


def _average(row: Row, columns: Sequence[str]) -> Cell:
    """Average over the columns, seed by seed; where they have no seed in common, the spread is over the columns."""
    cells = {column: row.cells[column] for column in columns if column in row.cells}
    if len(cells) < len(columns):
        lacking = f"{len(cells)} of {len(columns)} columns"
    else:
        lacking = next((cell.lacking for cell in cells.values() if not cell.whole), "")
    done = tuple({each.run.name: each for cell in cells.values() for each in cell.done}.values())
    common = [seed for seed in next(iter(cells.values())).values if all(seed in cell.values for cell in cells.values())]
    if not common:
        return Cell({column: cell.mean for column, cell in cells.items()}, done, lacking, over="columns")
    values = {seed: statistics.fmean(cell.values[seed] for cell in cells.values()) for seed in common}
    return Cell(values, tuple(each for each in done if each.run.seed in common), lacking)


def _put_published_beside(
    cell: Cell, row: Row, column: str, columns: Sequence[str], sources: Sequence[PublishedTable]
) -> None:
    for table in sources:
        if column == MEAN:
            cell.published, cell.published_std = _published_average(table, row, columns)
        else:
            cell.published = table.value(row.group, row.title, column)
        if cell.published is not None:
            return


def _published_average(table: PublishedTable, row: Row, columns: Sequence[str]) -> tuple[float | None, float | None]:
    """Give what the paper prints, or, of a part of its columns, its mean over that part."""
    if set(columns) >= set(table.columns):
        found = [each for each in table.rows if (each.group, each.row) == (row.group, row.title)]
        return table.value(row.group, row.title, MEAN), found[0].spread if found else None
    values = [table.value(row.group, row.title, column) for column in columns]
    known = [value for value in values if value is not None]
    return (statistics.fmean(known) if known and len(known) == len(values) else None), None


def _mark_best(table: Table) -> None:
    """Mark the lowest whole mean of each column and group, as it is printed, where there is something to compare.

    Differences and multiples have none: their rows may be of several sources.
    """
    if table.experiment.against is not None:
        return
    for group, column in itertools.product(table.groups, table.columns):
        cells = [row.whole_cells[column] for row in table.of(group) if column in row.whole_cells]
        means = [round(cell.mean, table.digits) for cell in cells]
        for cell, mean in zip(cells, means, strict=True):
            cell.best = mean == min(means) < max(means)
