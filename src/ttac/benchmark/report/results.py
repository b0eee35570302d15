"""The results of a benchmark as they lie in their folders: experiments, records, failures and points."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ttac.evaluation.records import FORMAT, Record

EXPERIMENT = "experiment.json"
EXPERIMENT_FORMAT, FAILURE_FORMAT, POINTS_FORMAT = "ttac.experiment/1", "ttac.failure/1", "ttac.points/1"
METRICS = ("error", "seconds")
FIGURES = ("cumulative", "bars", "heatmap", "time", "tsne")


Part = tuple[str, str | None, int | None]  # target, domain, severity


@dataclass(frozen=True)
class Run:
    """The place of a run in its table, and what it ran on."""

    name: str
    group: str  # the protocol, "-" where there is none
    row: str
    column: str
    seed: int
    source: str
    target: str
    domain: str | None
    severity: int | None

    @property
    def part(self) -> Part:
        """Name the part of a cell's data that this run covers: several domains may share a column."""
        return self.target, self.domain, self.severity


@dataclass(frozen=True)
class Points:
    """Features of a run in the plane, as t-SNE lays them out."""

    points: list[tuple[float, float]]
    labels: list[int]


@dataclass(frozen=True)
class Done:
    """A run that has its record."""

    run: Run
    record: Record
    path: Path
    points: Points | None = None


@dataclass(frozen=True)
class Failure:
    """A run that ended in an error."""

    run: Run
    error: str
    path: Path


@dataclass(frozen=True)
class Experiment:
    """All that is known of one experiment at one scale; runs stand in the order of its table."""

    name: str
    scale: str
    title: str
    about: str
    command: str
    published: list[str]
    metric: str
    by_class: bool
    average: bool
    figures: list[str]
    classes: list[str] | None
    runs: list[str]
    folder: Path
    parts: dict[str, set[Part]]  # of the data, that a whole cell of a column is over
    done: list[Done] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)

    @property
    def key(self) -> str:
        """Give the name of its files: the experiment and the scale."""
        return f"{self.name}-{self.scale}"

    @property
    def complete(self) -> bool:
        """Tell whether every run has its record."""
        return len(self.done) == len(self.runs)

    @cached_property
    def places(self) -> list[Run]:
        """Give the runs of which the place is known, in the order of the table."""
        done = {done.run.name: done.run for done in self.done}
        known = {**{failure.run.name: failure.run for failure in self.failed}, **done}
        return [known[name] for name in self.runs if name in known]


def load_results(folder: Path, only: Sequence[str] = ()) -> tuple[list[Experiment], list[str]]:
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
    experiments, notes = [], []
    for file in files:
        if not only or file.resolve().parent.parent.name in only:
            experiment, stray = _load_experiment(file)
            experiments.append(experiment)
            notes += stray
    known = {file.parent for file in files}
    others = {path.parent for path in folder.rglob("*.json")} - known
    notes += [f"{other} has no {EXPERIMENT}: left out" for other in sorted(others)]
    return experiments, notes


def _load_experiment(file: Path) -> tuple[Experiment, list[str]]:
    content = _read(file, EXPERIMENT_FORMAT)
    folder = file.parent
    expect = _Expect(file, content)
    experiment = Experiment(
        name=expect.text("name"),
        scale=expect.text("scale"),
        title=expect.text("title"),
        about=expect.text("about"),
        command=expect.text("command"),
        published=expect.texts("published"),
        metric=expect.text("metric"),
        by_class=expect.kind("by_class", bool),
        average=expect.kind("average", bool),
        figures=expect.texts("figures"),
        classes=None if content.get("classes") is None else expect.texts("classes"),
        runs=expect.texts("runs"),
        folder=folder,
        parts=_parts(file, content.get("parts")),
    )
    own = file.resolve().parent
    if (own.parent.name, own.name) != (experiment.name, experiment.scale):
        raise ValueError(f"{file} is of {experiment.name} at scale {experiment.scale}, which is not its folder")
    if not all(re.fullmatch(r"\w[\w.+-]*", name) for name in (experiment.name, experiment.scale)):
        raise ValueError(f"{file}: names of experiments and scales are letters, digits, dots, hyphens and underscores")
    if experiment.metric not in METRICS or not set(experiment.figures) <= set(FIGURES):
        raise ValueError(f"{file}: the metric is one of {METRICS}, and figures are some of {FIGURES}")
    if len(set(experiment.runs)) < len(experiment.runs) or not all(map(_is_file_name, experiment.runs)):
        raise ValueError(f"{file}: runs must be different names of files, without folders")
    for name in experiment.runs:
        _add_run(experiment, name)
    listed = {path.name for name in experiment.runs for path in _files(folder, name)} | {EXPERIMENT}
    stray = sorted(path.name for path in folder.glob("*.json") if path.name not in listed)
    return experiment, [f"{folder / name} is no run of the experiment: left out" for name in stray]


def _parts(path: Path, content: object) -> dict[str, set[Part]]:
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not say which parts a whole column has: run ttac bench again, which rewrites it")
    try:
        return {column: {(target, domain, level) for target, domain, level in of} for column, of in content.items()}
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: parts must give the target, domain and severity of each part, by column") from error


def _is_file_name(name: str) -> bool:
    return bool(name) and not name.startswith(".") and not set(name) & set("/\\\0")


def _files(folder: Path, name: str) -> tuple[Path, Path, Path]:
    return folder / f"{name}.json", folder / f"{name}.failed.json", folder / f"{name}.tsne.json"


def _add_run(experiment: Experiment, name: str) -> None:
    path, failure, points = _files(experiment.folder, name)
    if path.exists():  # a failure beside it is of an earlier attempt
        record = _load_record(path)
        run = _run(path, record.provenance.get("run"), experiment, name)
        if experiment.by_class:
            _check_classes(path, record, experiment.classes)
        experiment.done.append(Done(run, record, path, _load_points(points) if points.exists() else None))
    elif failure.exists():
        content = _read(failure, FAILURE_FORMAT)
        run = _run(failure, content.get("run"), experiment, name)
        experiment.failed.append(Failure(run, _Expect(failure, content).text("error"), failure))


def _check_classes(path: Path, record: Record, classes: list[str] | None) -> None:
    if all(error is None for error in record.class_error):
        raise ValueError(f"{path} has no error of any class, and the columns of its experiment are classes")
    if classes is not None and len(record.class_error) != len(classes):
        raise ValueError(f"{path} has errors of {len(record.class_error)} classes, which are not the experiment's")


def _run(path: Path, content: object, experiment: Experiment, name: str) -> Run:
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not say which run of an experiment it is")
    expect = _Expect(path, content)
    of = tuple(expect.text(key) for key in ("experiment", "scale", "name"))
    if of != (experiment.name, experiment.scale, name):
        raise ValueError(f"{path} is the run {of[2]!r} of {of[0]} at scale {of[1]}, which is not its place")
    column = expect.text("column")
    if column not in experiment.parts:
        raise ValueError(f"{path}: {EXPERIMENT} has no parts of the column {column!r}: run ttac bench again")
    domain, severity = content.get("domain"), content.get("severity")
    return Run(
        name=name,
        group=expect.text("group"),
        row=expect.text("row"),
        column=column,
        seed=expect.kind("seed", int),
        source=expect.text("source"),
        target=expect.text("target"),
        domain=None if domain is None else expect.text("domain"),
        severity=None if severity is None else expect.kind("severity", int),
    )


def _load_record(path: Path) -> Record:
    _read(path, FORMAT)  # says of which file a mistake is
    try:
        record = Record.load(path)
        numbers = [record.seconds, *(value for point in record.cumulative_error for value in point)]
        errors = [value for value in (record.error, *record.class_error) if value is not None]
        whole = isinstance(record.provenance, dict) and type(record.samples) is int and record.samples > 0
        finite = all(type(value) in (int, float) and math.isfinite(value) for value in numbers + errors)
        possible = finite and record.seconds >= 0 and all(0 <= value <= 100 for value in errors)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a whole record: {error}") from error
    if not (whole and possible):
        raise ValueError(f"{path} is not a whole record: errors are percentages of at least one sample")
    if record.error is None:
        raise ValueError(f"{path} has no error: it was measured without labels")
    return record


def _load_points(path: Path) -> Points:
    content = _read(path, POINTS_FORMAT)
    try:
        points = [(float(x), float(y)) for x, y in content["points"]]
        labels = [int(value) for value in content["labels"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a whole set of points: {error}") from error
    finite = all(math.isfinite(value) for point in points for value in point)
    if not finite or not 0 < len(points) == len(labels):
        raise ValueError(f"{path} must have as many labels as finite points")
    return Points(points, labels)


def _read(path: Path, kind: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != kind:
        raise ValueError(f"{path} is not of the format {kind}")
    return content


class _Expect:
    """Values of a JSON object that must have a type; the error names the file and the key."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self._path = path
        self._content = content

    def kind(self, key: str, kind: type) -> Any:
        value = self._content.get(key)
        if type(value) is not kind:  # True is an int, too
            raise ValueError(f"{self._path}: {key} must be of type {kind.__name__}, not {value!r}")
        return value

    def text(self, key: str) -> str:
        return str(self.kind(key, str))

    def texts(self, key: str) -> list[str]:
        value = self.kind(key, list)
        if not all(isinstance(each, str) for each in value):
            raise ValueError(f"{self._path}: {key} must be a list of texts")
        return list(value)
