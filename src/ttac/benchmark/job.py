"""`ttac bench`: do the runs of an experiment that have no record yet."""

from __future__ import annotations

import json
import shlex
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ttac.benchmark.display import Display, duration
from ttac.benchmark.estimate import Estimator, ForwardTimes
from ttac.benchmark.execute import Task, execute
from ttac.benchmark.experiment import load_experiment, said
from ttac.benchmark.ingredients import Pantry, attempt
from ttac.benchmark.pool import Pool, Report, described
from ttac.benchmark.runs import Run, expand
from ttac.common.environment import environment
from ttac.common.files import write_json
from ttac.common.resumable import StoppedError, check_same_settings, ended_by_signals, plain_settings
from ttac.data.sets.specs import SPECS
from ttac.evaluation.engine import Outcome
from ttac.evaluation.records import Record

FORMAT, FAILURE = "ttac.experiment/1", "ttac.failure/1"
EXPERIMENT = "experiment.json"


@dataclass(frozen=True)
class BenchJob:
    """Which experiment to run at which scale, how, and where its records go."""

    file: Path
    out: Path
    scale: str = "tiny"
    overrides: tuple[str, ...] = ()
    bundles: Mapping[str, str] = field(default_factory=dict)  # trained source models, by the source's name
    cache: Path = Path("cache")  # for what runs need and is not there
    jobs: int = 1
    threads: int | None = None  # of a process; None: the machine's, divided
    shard: tuple[int, int] = (1, 1)  # which part of how many
    dry_run: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        part, parts = self.shard
        if not 1 <= part <= parts:
            raise ValueError(f"--shard is i/n with i from 1 to n, not {part}/{parts}")
        if self.jobs < 1 or (self.threads is not None and self.threads < 1):
            raise ValueError("--jobs and --threads must be at least 1")


class Bench:
    """An experiment at a scale, with what is known of its runs."""

    def __init__(self, job: BenchJob) -> None:
        self.job = job
        self.experiment = load_experiment(job.file, job.scale, job.overrides)
        self.runs = expand(self.experiment)
        self.pantry = Pantry(self.experiment, job.cache, job.bundles, job.device)
        self.folder = job.out / job.file.stem / job.scale

    @cached_property
    def records(self) -> dict[str, Record]:
        """The records that are there, by run; one of other settings raises an error."""
        found = {}
        for run in self.runs:
            path = self.path(run)
            if path.exists():
                found[run.name] = _load(path)
                check_same_settings(path, found[run.name].provenance["run"], self.settings(run))
        self.check_weights(found)
        return found

    def check_weights(self, records: Mapping[str, Record]) -> None:
        """Raise an error where a record is not of the weights that runs have now; those to be trained are not known."""
        known = {source: self.pantry.weights(source) for source in dict.fromkeys(run.source for run in self.runs)}
        for run in self.runs:
            if run.name in records and known[run.source] is not None:
                there = {"weights": records[run.name].provenance["model"]}
                check_same_settings(self.path(run), there, {"weights": known[run.source]})

    @property
    def share(self) -> list[Run]:
        """The runs of this shard, which are the same ones whatever is done already."""
        part, parts = self.job.shard
        return self.runs[part - 1 :: parts]

    @property
    def remaining(self) -> list[Run]:
        """The runs of this shard that have no record, the first seed of all before the second of any."""
        return sorted((run for run in self.share if run.name not in self.records), key=lambda run: run.seed)

    @cached_property
    def estimator(self) -> Estimator:
        """How long runs take."""
        measured = [(run, self.records[run.name]) for run in self.runs if run.name in self.records]
        return Estimator(measured, ForwardTimes(self.experiment))

    def path(self, run: Run) -> Path:
        """Give the file of a run's record."""
        return self.folder / f"{run.name}.json"

    def failure(self, run: Run) -> Path:
        """Give the file that says why a run failed."""
        return self.folder / f"{run.name}.failed.json"

    def settings(self, run: Run) -> dict[str, Any]:
        """Say all that a run's record depends on, but for the weights."""
        return plain_settings(
            {
                "experiment": self.job.file.stem,
                "scale": self.job.scale,
                **run.settings(),
                "data": said(self.experiment.targets[run.target]),
                "training": self.pantry.training(run.source),
            }
        )

    def samples(self, run: Run) -> int | None:
        """Count the samples of a run's stream, None where the data would have to be read for that."""
        target = self.experiment.targets[run.target]
        known = SPECS.get(target.data)
        return run.samples or (None if known is None else known.counts.get(target.split))

    def seconds(self, run: Run) -> float | None:
        """Estimate the time of a run."""
        samples = self.samples(run)
        return None if samples is None else self.estimator.seconds(run, samples)

    def describe(self) -> None:
        """Write what a report has to know of the experiment."""
        about = self.experiment
        job = self.job
        overrides = ["--set", *job.overrides] if job.overrides else []
        bundles = ["--source", *(f"{name}={bundle}" for name, bundle in job.bundles.items())] if job.bundles else []
        command = shlex.join(["ttac", "bench", str(job.file), "--scale", job.scale, *overrides, *bundles])
        classes = next((SPECS[t.data].classes for t in about.targets.values() if t.data in SPECS), None)
        parts: dict[str, list[Any]] = {}  # of the data, that a whole cell of a column is over
        for run in self.runs:
            part = [run.target, run.domain, run.severity]
            if part not in parts.setdefault(run.column, []):
                parts[run.column].append(part)
        content = {
            "format": FORMAT, "name": job.file.stem, "scale": job.scale, "title": about.title, "about": about.about,
            "command": command, "published": about.published, "metric": about.metric, "by_class": about.by_class,
            "average": about.average, "figures": about.figures, "classes": None if classes is None else list(classes),
            "runs": [run.name for run in self.runs], "parts": parts,
        }  # fmt: skip
        path = self.folder / EXPERIMENT
        if attempt(lambda: json.loads(path.read_text())) != plain_settings(content):
            write_json(path, content)


def run_benches(jobs: Sequence[BenchJob], console: Console) -> None:
    """Do some jobs, one after another; a mistake in any raises before the first starts, a failure after the last."""
    for job in jobs:
        Bench(job)
    failed = []
    for job in jobs:
        try:
            run_bench(job, console)
        except StoppedError:
            raise
        except Exception as error:
            failed.append(error)
            if len(jobs) > 1:
                console.print(f"{job.file}: {error}", markup=False)
    if failed:
        raise failed[0] if len(jobs) == 1 else ValueError(f"{len(failed)} of {len(jobs)} experiments have failed runs")


def run_bench(job: BenchJob, console: Console) -> None:
    """Do the job, or the rest of it; failed runs are told at the end."""
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
        failed = list(_do(bench, remaining, console))
    if failed:
        raise ValueError(
            f"{len(failed)} of {len(remaining)} runs failed, the first one with: {failed[0]}; {bench.folder} has a "
            ".failed.json for each, and the same command tries them again"
        )


def _do(bench: Bench, runs: Sequence[Run], console: Console) -> Iterator[str]:
    """Do runs and yield the errors of those that fail."""
    job, targets = bench.job, bench.experiment.targets
    tasks, lacking = [], []
    for run, found in zip(runs, bench.pantry.prepare(runs, console).values(), strict=True):
        if isinstance(found, Exception):
            lacking.append((run, found))
        else:
            tasks.append(Task(run, targets[run.target], found, bench.settings(run), bench.path(run), job.device))
    if not tasks:  # one mistake, and no reason for a file a run
        raise lacking[0][1]
    bench.check_weights(bench.records)
    bench.describe()
    for run, error in lacking:
        yield _note_failure(bench, run, described(error), "".join(traceback.format_exception(error)))
    jobs = min(job.jobs, len(tasks))
    # As many as torch would use here, which goes by the processors that are allowed and by OMP_NUM_THREADS.
    threads = job.threads or max(1, torch.get_num_threads() // jobs)
    display = Display(console, {task.run.name: bench.seconds(task.run) for task in tasks}, jobs)
    with display, closing(Pool(_work, jobs, threads).run(tasks)) as events:
        for event in events:
            display.show(event)
            if event.kind == "done":
                bench.failure(event.task.run).unlink(missing_ok=True)
            elif event.kind == "failed":
                yield _note_failure(bench, event.task.run, *event.value)


def _work(task: Task, report: Report) -> tuple[float | None, float]:
    if task.out.exists():  # another process has been faster
        record = _load(task.out)
        check_same_settings(task.out, record.provenance["run"], task.settings)
    else:
        record = execute(task, lambda outcome: report(_progress(outcome)))
    return record.error, record.seconds


def _load(path: Path) -> Record:
    try:
        record = Record.load(path)
        dict(record.provenance["run"]), str(record.provenance["model"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no record of a run, or damaged: delete it to run it again ({error})") from error
    return record


def _progress(outcome: Outcome) -> tuple[int, float | None]:
    return outcome.samples, outcome.error


def _note_failure(bench: Bench, run: Run, error: str, trace: str) -> str:
    content = {"format": FAILURE, "run": bench.settings(run), "error": error, "traceback": trace, **environment()}
    write_json(bench.failure(run), content)
    return error


def list_runs(bench: Bench, console: Console) -> None:
    """Print the runs of this shard with their state and estimated time; nothing is written."""
    table = Table(title=f"{bench.experiment.title} ({bench.job.scale})")
    for heading, side in (("run", "left"), ("samples", "right"), ("state", "left"), ("seconds", "right")):
        table.add_column(heading, justify=side)  # type: ignore[arg-type]
    total, unknown = 0.0, 0
    for run in bench.share:
        if run.name in bench.records:
            state, seconds = "done", None
        else:
            state, seconds = "failed before" if bench.failure(run).exists() else "to do", bench.seconds(run)
            total, unknown = total + (seconds or 0), unknown + (seconds is None)
        count = bench.samples(run)
        table.add_row(
            run.name, "?" if count is None else str(count), state, "" if seconds is None else f"{seconds:.1f}"
        )
    console.print(table)
    left = len(bench.remaining)
    beside = f", without {unknown} of unknown length" if unknown else ""
    console.print(f"{left} of {len(bench.share)} runs to do: about {duration(total)} on one process{beside}")
    for source in dict.fromkeys(run.source for run in bench.remaining):
        if bench.pantry.weights(source) is None:
            console.print(f"the source model {source} is trained first, which is not counted", markup=False)
