"""`ttac bench`: do the runs of an experiment that have no record yet, and show how far they are."""

from __future__ import annotations

import json
import shlex
import traceback
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import TaskID
from rich.table import Table

from ttac.benchmark.executor import Done, Event, Executor, Failed, Progress, Started, Task, described
from ttac.benchmark.experiment import EXPERIMENTS, load_experiment, said
from ttac.benchmark.jobs import BenchJob
from ttac.benchmark.prerequisites import Prerequisites, attempt
from ttac.benchmark.processes import LocalProcesses
from ttac.benchmark.report.results import EXPERIMENT, EXPERIMENT_FORMAT, FAILURE_FORMAT
from ttac.benchmark.runs import Part, PlannedRun, expand, runs_of_tables
from ttac.common.environment import environment
from ttac.common.files import write_json
from ttac.common.resumable import check_same_settings, ended_by_signals, image_progress, plain_settings
from ttac.data.sets.specs import SPECS
from ttac.evaluation.records import Record


class Bench:
    """An experiment at a scale, with what is known of its runs."""

    def __init__(self, job: BenchJob) -> None:
        self.job = job
        self.experiment = load_experiment(job.file, job.scale, job.overrides)
        self.runs = expand(self.experiment)
        self.prerequisites = Prerequisites(self.experiment, job.cache, job.bundles, job.device)
        self.folder = job.out / job.file.stem / job.scale
        if not self.chosen:
            raise ValueError(f"no run is called {' or '.join(job.only)}: --dry-run without --only lists them")

    @cached_property
    def records(self) -> dict[str, Record]:
        """The records that are there, by run; one of other settings or weights raises an error."""
        found = {run.name: self.record(run) for run in self.runs}
        return {name: record for name, record in found.items() if record is not None}

    def record(self, run: PlannedRun) -> Record | None:
        """Read the record of a run, None where there is none; one of other settings or weights raises an error."""
        path, now = self.path(run), self.settings(run)
        if not path.exists():
            return None
        try:
            record = Record.load(path)
            there = {**record.provenance["run"], "weights": record.provenance["model"]}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is no record of a run, or damaged: delete it to run it again ({error})"
            ) from error
        weights = self.prerequisites.weights(run.source)  # those that are still to be trained are not known
        check_same_settings(path, there, now if weights is None else {**now, "weights": weights})
        return record

    @property
    def chosen(self) -> list[PlannedRun]:
        """The runs that the job asks for, all unless it names some."""
        only = self.job.only
        return [run for run in self.runs if not only or any(fnmatchcase(run.name, name) for name in only)]

    @property
    def share(self) -> list[PlannedRun]:
        """The runs of this shard, which are the same ones whatever is done already."""
        part, parts = self.job.shard
        return self.chosen[part - 1 :: parts]

    @property
    def remaining(self) -> list[PlannedRun]:
        """The runs of this shard that have no record, the first seed of all before the second of any."""
        return sorted((run for run in self.share if run.name not in self.records), key=lambda run: run.seed)

    def path(self, run: PlannedRun) -> Path:
        """Give the file of a run's record."""
        return self.folder / f"{run.name}.json"

    def failure(self, run: PlannedRun) -> Path:
        """Give the file that says why a run failed."""
        return self.folder / f"{run.name}.failed.json"

    def settings(self, run: PlannedRun) -> dict[str, Any]:
        """Say all that a run's record depends on, but for the weights."""
        bench = {"experiment": self.job.file.stem, "scale": self.job.scale}
        training = self.prerequisites.training(run.source)
        data = said(self.experiment.targets[run.target])
        return plain_settings({**bench, **run.settings(), "data": data, "training": training})

    @cached_property
    def usual_seconds(self) -> dict[str, float]:
        """The median time of the runs that have a record, by their kind."""
        known: dict[str, list[float]] = {}
        for run in self.runs:
            if run.name in self.records:
                known.setdefault(run.kind, []).append(self.records[run.name].seconds)
        return {kind: median(seconds) for kind, seconds in known.items()}

    def keep(self, done: Done) -> None:
        """Write the record of a run, after the features, as it says that all is there."""
        if done.points is not None:
            write_json(self.path(done.task.run).with_suffix(".tsne.json"), done.points)
        done.record.save(self.path(done.task.run))
        self.failure(done.task.run).unlink(missing_ok=True)

    def note_failure(self, run: PlannedRun, error: str, trace: str) -> str:
        """Write why a run failed, and give the error."""
        content = {"format": FAILURE_FORMAT, "run": self.settings(run), "error": error, "traceback": trace}
        write_json(self.failure(run), {**content, **environment()})
        return error

    def describe(self) -> None:
        """Write what a report has to know of the experiment."""
        about, job = self.experiment, self.job
        overrides = ["--set", *job.overrides] if job.overrides else []
        bundles = ["--source", *(f"{name}={bundle}" for name, bundle in job.bundles.items())] if job.bundles else []
        file = job.file.stem if job.file.parent == EXPERIMENTS else str(job.file)
        command = shlex.join(["ttac", "bench", file, "--scale", job.scale, *overrides, *bundles])
        classes = next((SPECS[t.data].classes for t in about.targets.values() if t.data in SPECS), None)
        tables = runs_of_tables(about)
        parts: dict[str, dict[Part, None]] = {}  # of the data, that a whole cell of a column is over
        for run in self.runs:
            parts.setdefault(run.column, {})[run.part] = None
        content = {
            "format": EXPERIMENT_FORMAT, "name": job.file.stem, "scale": job.scale, "title": about.title,
            "about": about.about, "command": command, "published": about.published, "metric": about.metric,
            "by_class": about.by_class, "average": about.average, "figures": about.figures, "classes": classes,
            "tables": {name: {**asdict(about.tables[name]), "runs": runs} for name, runs in tables.items()},
            "runs": [run.name for run in self.runs], "parts": {column: list(found) for column, found in parts.items()},
        }  # fmt: skip
        path = self.folder / EXPERIMENT
        if attempt(lambda: json.loads(path.read_text())) != plain_settings(content):
            write_json(path, content)


class Display:
    """A bar of all runs and a line for each one under way; finished runs are printed above.

    `progress` draws them, from where its `with` block begins to where it ends.
    """

    def __init__(self, console: Console, runs: int) -> None:
        self.progress = image_progress(console, "{task.fields[note]}")
        self._all = self.progress.add_task("runs", total=runs, note="")
        self._lines: dict[str, TaskID] = {}
        self._failed = 0

    def show(self, event: Event) -> None:
        """Bring the display up to an event."""
        run = event.task.run
        match event:
            case Started():
                self._lines[run.name] = self.progress.add_task(run.name, total=run.samples, note="")
            case Progress():
                self.progress.update(self._lines[run.name], completed=event.samples, note=_percent(event.error))
            case Done():
                self._finish(run.name, f": {_percent(event.record.error)} in {event.record.seconds:.1f} s")
            case Failed():
                self._failed += 1
                self._finish(run.name, f" failed: {event.error}")

    def _finish(self, name: str, told: str) -> None:
        self.progress.console.print(f"{name}{told}", markup=False, highlight=False)
        if name in self._lines:  # not where another process has done it
            self.progress.remove_task(self._lines.pop(name))
        self.progress.update(self._all, advance=1, note=f"{self._failed} failed" if self._failed else "")


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:.2f} % error"


def run_benches(jobs: Sequence[BenchJob], console: Console) -> None:
    """Do some jobs, one after another; a mistake in any raises before the first starts, a failure after the last."""
    for job in jobs:
        Bench(job)
    failed = []
    for job in jobs:
        error = attempt(partial(run_bench, job, console))
        if error is not None:
            failed.append(error)
            if len(jobs) > 1:
                console.print(f"{job.file}: {error}", markup=False)
    if failed:
        raise failed[0] if len(jobs) == 1 else ValueError(f"{len(failed)} of {len(jobs)} experiments have failed runs")


def run_bench(job: BenchJob, console: Console, executor: Executor | None = None) -> None:
    """Do the job, or the rest of it, by processes of this machine unless told otherwise; failures are told last."""
    bench = Bench(job)
    if job.dry_run:
        list_runs(bench, console)
        return
    remaining = bench.remaining
    done = len(bench.share) - len(remaining)
    console.print(f"{bench.experiment.title}: {len(remaining)} runs, {done} done before", markup=False)
    if not remaining:
        bench.describe()
        return
    with ended_by_signals(f"stopped; the same command goes on from what is in {bench.folder}"):
        failed = list(_do(bench, remaining, console, executor))
    if failed:
        raise ValueError(
            f"{len(failed)} of {len(remaining)} runs failed, the first one with: {failed[0]}; {bench.folder} has a "
            ".failed.json for each, and the same command tries them again"
        )


def _do(bench: Bench, runs: Sequence[PlannedRun], console: Console, executor: Executor | None) -> Iterator[str]:
    """Do runs and yield the errors of those that fail."""
    job, targets = bench.job, bench.experiment.targets
    tasks, lacking = [], []
    for run, found in zip(runs, bench.prerequisites.prepare(runs, console).values(), strict=True):
        if isinstance(found, Exception):
            lacking.append((run, found))
        else:
            tasks.append(Task(run, targets[run.target], found, bench.settings(run), job.device, job.log))
    if not tasks:  # one mistake, and no reason for a file a run
        raise lacking[0][1]
    for run in bench.runs:  # the weights are known now
        bench.record(run)
    bench.describe()
    for run, error in lacking:
        yield bench.note_failure(run, described(error), "".join(traceback.format_exception(error)))
    display = Display(console, len(tasks))

    def not_done_elsewhere() -> Iterator[Task]:
        for task in tasks:
            record = bench.record(task.run)
            if record is None:
                yield task
            else:  # another process has been faster
                display.show(Done(task, record))

    executor = executor or LocalProcesses(min(job.jobs, len(tasks)), job.threads)
    with display.progress, closing(executor.run(not_done_elsewhere())) as events:
        for event in events:
            if isinstance(event, Done):
                bench.keep(event)
            elif isinstance(event, Failed):
                yield bench.note_failure(event.task.run, event.error, event.traceback)
            display.show(event)


def list_runs(bench: Bench, console: Console) -> None:
    """Print the runs of this shard with their state, and the time that those of their kind took; nothing is written."""
    table = Table("run", "state", "seconds", title=f"{bench.experiment.title} ({bench.job.scale})")
    table.columns[-1].justify = "right"
    for run in bench.share:
        if run.name in bench.records:
            table.add_row(run.name, "done")
        else:
            seconds = bench.usual_seconds.get(run.kind)
            state = "failed before" if bench.failure(run).exists() else "to do"
            table.add_row(run.name, state, None if seconds is None else f"{seconds:.1f}")
    console.print(table)
    known = [bench.usual_seconds[run.kind] for run in bench.remaining if run.kind in bench.usual_seconds]
    console.print(f"{len(bench.remaining)} of {len(bench.share)} runs to do", markup=False)
    if known:
        spent = timedelta(seconds=round(sum(known)))
        console.print(f"{len(known)} of them take about {spent} on one process, as others of their kind did")
    for source in dict.fromkeys(run.source for run in bench.remaining):
        if bench.prerequisites.weights(source) is None:
            console.print(f"the source model {source} is trained first", markup=False)
