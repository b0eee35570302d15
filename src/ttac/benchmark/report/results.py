"""The results of a benchmark as they lie in their folders: experiments, records, failures and points."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttac.benchmark.experiment import Figure, Metric, TableSpec, from_mapping
from ttac.benchmark.runs import Part, PlannedRun
from ttac.common.options import check_value
from ttac.evaluation.records import Record

EXPERIMENT = "experiment.json"
EXPERIMENT_FORMAT, FAILURE_FORMAT, POINTS_FORMAT = "ttac.experiment/1", "ttac.failure/1", "ttac.points/1"
SUFFIXES = (".json", ".failed.json", ".tsne.json")  # of a record, a failure, and features in the plane
WORD = re.compile(r"\w[\w.+-]*")  # of the names of files that a report writes
FILE_NAME = re.compile(r"[^./\\\0][^/\\\0]*")  # without folders, and not hidden
PERCENT = {"least": 0.0, "most": 100.0}


@dataclass(frozen=True)
class Points:
    """Features of a run in the plane, as t-SNE lays them out."""

    points: NDArray[np.float64]  # (N, 2)
    labels: NDArray[np.int_]


@dataclass(frozen=True)
class RunResult:
    """A run that has its record."""

    run: PlannedRun
    record: Record
    path: Path
    points: Points | None = None


@dataclass(frozen=True)
class RunFailure:
    """A run that ended in an error."""

    run: PlannedRun
    error: str
    path: Path

    @property
    def first_line(self) -> str:
        """Give the first line of the error."""
        return (self.error.strip().splitlines() or [""])[0]


@dataclass(frozen=True)
class DescribedTable(TableSpec):
    """One of the tables of an experiment."""

    runs: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Description:
    """What `ttac bench` writes of an experiment at a scale."""

    name: str
    scale: str
    title: str
    about: str
    command: str
    published: list[str]
    metric: Metric
    by_class: bool
    average: bool
    figures: list[Figure]
    runs: list[str]  # in the order of the table
    parts: dict[str, set[Part]]  # of the data, that a whole cell of a column is over
    classes: list[str] | None = None
    tables: dict[str, DescribedTable] = field(default_factory=dict)


@dataclass(frozen=True)
class ExperimentResults(Description):
    """All that is known of one experiment at one scale, or what one of its tables shows of it."""

    table: str = ""
    against: str | None = None  # see `TableSpec`
    done: list[RunResult] = field(default_factory=list)
    failed: list[RunFailure] = field(default_factory=list)

    @property
    def key(self) -> str:
        """Give the name of its files: the experiment and the scale, and the table where there are several."""
        return "-".join(filter(None, (self.name, self.scale, self.table)))

    @property
    def complete(self) -> bool:
        """Tell whether every run has its record."""
        return len(self.done) == len(self.runs)

    @cached_property
    def class_names(self) -> list[str]:
        """Give the names of the classes, or their numbers where the data have no names for them."""
        most = max((len(done.record.class_error) for done in self.done), default=0)
        return self.classes or [str(index) for index in range(most)]

    @cached_property
    def places(self) -> list[PlannedRun]:
        """Give the runs of which the place is known, in the order of the table."""
        done = {done.run.name: done.run for done in self.done}
        known = {**{failure.run.name: failure.run for failure in self.failed}, **done}
        return [known[name] for name in self.runs if name in known]


def by_table(experiment: ExperimentResults) -> list[ExperimentResults]:
    """Give what each table of an experiment shows; one that names no tables is one."""
    parts = []
    for name, table in experiment.tables.items():
        runs = set(table.runs)
        parts.append(
            replace(
                experiment,
                table=name,
                title=f"{experiment.title}: {table.title}",
                about=table.about or experiment.about,
                metric=table.metric,
                against=table.against,
                runs=table.runs,
                done=[done for done in experiment.done if done.run.name in runs],
                failed=[failure for failure in experiment.failed if failure.run.name in runs],
            )
        )
    return parts or [experiment]


def load_results(folder: Path, only: Sequence[str] = ()) -> tuple[list[ExperimentResults], list[str]]:
    """Read all experiments below a folder, or those named in `only`, and give notes on what was left out.

    What does not follow its format raises an error; runs that are missing or failed do not.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder: name one that ttac bench wrote results to")
    files = sorted(folder.rglob(EXPERIMENT))
    if not files:
        raise ValueError(f"there are no results in {folder}: run ttac bench first, which writes {EXPERIMENT} there")
    names = {file.resolve().parent.parent.name for file in files}
    unknown = [name for name in only if name not in names]
    if unknown:
        raise ValueError(f"no results of {', '.join(unknown)} in {folder}; there are {', '.join(sorted(names))}")
    chosen = [file for file in files if not only or file.resolve().parent.parent.name in only]
    experiments = [_load_experiment(file) for file in chosen]
    notes = [note for file, experiment in zip(chosen, experiments, strict=True) for note in _strays(file, experiment)]
    others = {path.parent for path in folder.rglob("*.json")} - {file.parent for file in files}
    return experiments, notes + [f"{other} has no {EXPERIMENT}: left out" for other in sorted(others)]


def _strays(file: Path, experiment: Description) -> Iterator[str]:
    listed = {f"{name}{suffix}" for name in experiment.runs for suffix in SUFFIXES} | {EXPERIMENT}
    for path in sorted(file.parent.glob("*.json")):
        if path.name not in listed:
            yield f"{path} is no run of the experiment: left out"


def _load_experiment(file: Path) -> ExperimentResults:
    described = from_mapping(Description, _known_keys(Description, _read(file, EXPERIMENT_FORMAT)), file)
    experiment = ExperimentResults(**vars(described))
    own = file.resolve().parent
    if (own.parent.name, own.name) != (experiment.name, experiment.scale):
        raise ValueError(f"{file} is of {experiment.name} at scale {experiment.scale}, which is not its folder")
    if not all(map(WORD.fullmatch, (experiment.name, experiment.scale, *experiment.tables))):
        raise ValueError(
            f"{file}: names of experiments, scales and tables are letters, digits, dots, hyphens and underscores"
        )
    if len(set(experiment.runs)) < len(experiment.runs) or not all(map(FILE_NAME.fullmatch, experiment.runs)):
        raise ValueError(f"{file}: runs must be different names of files, without folders")
    for name in experiment.runs:
        path, failure, points = (file.parent / f"{name}{suffix}" for suffix in SUFFIXES)
        if path.exists():  # a failure beside it is of an earlier attempt
            record = _load_record(path, experiment)
            place = _place(path, record.provenance.get("run"), experiment, name)
            laid_out = _load_points(points) if points.exists() else None
            experiment.done.append(RunResult(place, record, path, laid_out))
        elif failure.exists():
            content = _read(failure, FAILURE_FORMAT)
            place = _place(failure, content.get("run"), experiment, name)
            experiment.failed.append(RunFailure(place, str(content.get("error")), failure))
    return experiment


def _place(path: Path, content: object, experiment: Description, name: str) -> PlannedRun:
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not say which run of an experiment it is")
    if [content.get(key) for key in ("experiment", "scale", "name")] != [experiment.name, experiment.scale, name]:
        raise ValueError(f"{path} is of another run, experiment or scale")
    try:  # without `from_mapping`, which would take seconds for a thousand records
        run = PlannedRun(**_known_keys(PlannedRun, content))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not all(isinstance(text, str) for text in (run.group, run.row, run.source, run.target, run.domain or "")):
        raise ValueError(f"{path}: a run's protocol, row, source, target and domain must be texts")
    if run.column not in experiment.parts:
        raise ValueError(f"{path}: {EXPERIMENT} has no parts of the column {run.column!r}: run ttac bench again")
    return run


def _load_record(path: Path, experiment: Description) -> Record:
    try:
        record = Record.load(path)
        dict(record.provenance)
        check_value("samples", record.samples, int, {"least": 1})
        check_value("seconds", record.seconds, float, {"least": 0})
        check_value("error", record.error, float, PERCENT)
        check_value("latency_ms.update.mean", record.update_seconds, float | None, {"least": 0})
        for error in record.class_error:
            check_value("class_error", error, float | None, PERCENT)
        check_value("cumulative_error", record.cumulative_error, list[tuple[float, ...]], {})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a whole record with labels: {error}") from error
    if experiment.by_class and all(error is None for error in record.class_error):
        raise ValueError(f"{path} has no error of any class, and the columns of its experiment are classes")
    if experiment.by_class and experiment.classes and len(record.class_error) != len(experiment.classes):
        raise ValueError(f"{path} has errors of {len(record.class_error)} classes, which are not the experiment's")
    return record


def _load_points(path: Path) -> Points:
    content = _read(path, POINTS_FORMAT)
    try:
        found = Points(np.array(content["points"], dtype=float), np.array(content["labels"], dtype=int))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a whole set of points: {error}") from error
    if not len(found.labels) or found.points.shape != (len(found.labels), 2) or not np.isfinite(found.points).all():
        raise ValueError(f"{path} must have as many labels as finite points")
    return found


def _known_keys(kind: type, content: dict[str, Any]) -> dict[str, Any]:
    """Leave keys out that files of other versions have."""
    return {each.name: content[each.name] for each in fields(kind) if each.name in content}


def _read(path: Path, kind: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != kind:
        raise ValueError(f"{path} is not of the format {kind}")
    return content
