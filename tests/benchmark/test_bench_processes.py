"""`ttac bench` in processes: what becomes of those that die, of signals, of shards, and what is said meanwhile."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import ttac.benchmark.job
from bench_helpers import InlineExecutor, shared_cache, write_experiment
from ttac.benchmark.executor import Done, Event, Failed, Progress, Started, Task
from ttac.benchmark.experiment import EXPERIMENTS, TargetSpec
from ttac.benchmark.job import Bench, BenchJob, Display, run_bench
from ttac.benchmark.prerequisites import RunFiles
from ttac.benchmark.processes import LocalProcesses
from ttac.benchmark.runs import PlannedRun
from ttac.cli import main
from ttac.evaluation.records import Record

ONE = ("targets.C10-C.corruptions=[contrast]", "targets.C10-C.samples=40")


def work(task: str, report: Callable[[int, float | None], None]) -> tuple[Any, ...]:
    """Do what a task says, in a worker."""
    report(len(task), 12.5)
    if task == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "half":  # a message of a hundred bytes of which three arrive
        pipe = report.__closure__[0].cell_contents  # type: ignore[attr-defined]
        os.write(pipe.fileno(), struct.pack("!i", 100) + b"abc")
        os._exit(4)
    if task == "raise":
        raise KeyError("surprise")
    return (task.upper(), torch.get_num_threads(), os.getpid()), None


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_cache(tmp_path_factory)


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# Processes


def of_kind(events: Iterable[Event], *kinds: type[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kinds)]


def test_a_worker_that_dies_fails_its_task_alone() -> None:
    names = ["a", "raise", "kill", "half", "b"]
    events = list(LocalProcesses(1, 2, work).run(names))
    assert [event.task for event in of_kind(events, Started)] == names
    assert of_kind(events, Progress) == [Progress(name, len(name), 12.5) for name in names]
    done = {event.task: event.record for event in of_kind(events, Done)}
    assert {name: record[:2] for name, record in done.items()} == {"a": ("A", 2), "b": ("B", 2)}
    failed = {event.task: event for event in of_kind(events, Failed)}
    assert failed["raise"].error == "KeyError: 'surprise'"
    assert "in work" in failed["raise"].traceback
    assert (failed["kill"].traceback, failed["half"].traceback) == ("", "")
    assert "SIGKILL" in failed["kill"].error
    assert "4" in failed["half"].error
    assert not is_alive(done["b"][2])


def test_a_worker_that_died_while_idle_is_replaced() -> None:
    events = LocalProcesses(1, 1, work).run(["a", "b"])
    first = next(event for event in events if isinstance(event, Done))
    os.kill(first.record[2], signal.SIGKILL)
    wait_for(lambda: not is_alive(first.record[2]))
    (second,) = of_kind(events, Done, Failed)
    assert second.record[0] == "B"


def test_tasks_are_taken_when_a_worker_is_free() -> None:
    taken = []

    def tasks() -> Iterator[str]:
        for name in "abc":
            taken.append(name)
            yield name

    for event in LocalProcesses(1, 1, work).run(tasks()):
        if isinstance(event, Started):
            assert taken[-1] == event.task
    assert taken == ["a", "b", "c"]


def is_alive(process: int) -> bool:
    """Tell whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_two_processes_give_what_one_gives(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_experiment(tmp_path)
    job = BenchJob(file, tmp_path / "two", overrides=ONE, cache=cache, jobs=2, threads=torch.get_num_threads())
    console = quiet()
    run_bench(job, console)
    monkeypatch.setattr(ttac.benchmark.job, "LocalProcesses", InlineExecutor)
    run_bench(BenchJob(file, tmp_path / "one", overrides=ONE, cache=cache), quiet())
    names = [path.name for path in sorted((tmp_path / "one/small/tiny").glob("n-*"))]
    assert len(names) == 3
    for name in names:
        one, two = (Record.load(tmp_path / folder / "small/tiny" / name) for folder in ("one", "two"))
        assert (one.error, one.cumulative_error) == (two.error, two.cumulative_error)
        assert two.provenance["command"] == one.provenance["command"]  # of the process that was called
        assert two.provenance["threads"] == torch.get_num_threads()
        assert f"{name[:-5]}: {two.error:.2f} % error in" in said(console)


@pytest.mark.parametrize(("count", "threads", "expected"), [(1, None, 4), (2, None, 2), (9, None, 1), (2, 3, 3)])
def test_threads_are_divided(count: int, threads: int | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert LocalProcesses(count, threads).threads == expected


def test_there_are_no_more_processes_than_runs(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Counted(InlineExecutor):
        def __init__(self, *given: Any) -> None:
            asked.append(given)

    monkeypatch.setattr(ttac.benchmark.job, "LocalProcesses", Counted)
    overrides = (*ONE, "runs=[{methods: [test, bn], protocol: N-O-SF}]")
    job = BenchJob(write_experiment(tmp_path), tmp_path, "tiny", overrides, cache=cache, jobs=9, threads=3)
    run_bench(job, quiet())
    assert asked == [(2, 3)]


# Any executor


def made_up(task: Task, error: float, weights: str | None = "feedbeef") -> Record:
    notes = {"run": task.settings, "model": weights}
    return Record(40, error, [(40, error)], [error], {}, 2.5, 0.0, 0.0, {}, notes)


class Machine:
    """Stands for an executor of another machine: it keeps nothing, and fails what it is told to."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails

    def run(self, tasks: Iterable[Task]) -> Iterator[Event]:
        for task in tasks:
            yield Started(task)
            if task.run.method == self.fails:
                yield Failed(task, "RuntimeError: unplugged", "trace")
            else:
                yield Done(task, made_up(task, 10.0), {"points": [], "labels": []} if task.run.features else None)


def test_what_an_executor_returns_is_kept_whatever_it_is(tmp_path: Path, cache: Path) -> None:
    job = BenchJob(write_experiment(tmp_path), tmp_path, overrides=(*ONE, "features=5"), cache=cache)
    console = quiet()
    with pytest.raises(ValueError, match="1 of 3 runs failed"):
        run_bench(job, console, Machine(fails="tent"))
    folder = tmp_path / "small/tiny"
    tent = "n-o-sf-tent-contrast-c10-c-5-seed-0"
    assert json.loads((folder / f"{tent}.failed.json").read_text())["error"] == "RuntimeError: unplugged"
    assert f"{tent} failed: RuntimeError: unplugged" in said(console)
    kept = {path.name for path in folder.iterdir()} - {"experiment.json", f"{tent}.failed.json"}
    names = ("n-o-sf-test-contrast-c10-c-5-seed-0", "n-o-sl-ttac-contrast-c10-c-5-seed-0")
    assert kept == {f"{name}{suffix}" for name in names for suffix in (".json", ".tsne.json")}
    with pytest.raises(ValueError, match="weights"):  # of no weights that are here
        run_bench(job, quiet(), Machine())


def test_a_run_that_another_bench_has_done_meanwhile_is_not_done_again(tmp_path: Path, cache: Path) -> None:
    job = BenchJob(write_experiment(tmp_path), tmp_path, overrides=ONE, cache=cache)
    bench, done = Bench(job), []

    class Slow(Machine):
        def run(self, tasks: Iterable[Task]) -> Iterator[Event]:
            for task in tasks:
                weights = bench.prerequisites.weights("plain")
                for run in bench.runs:  # by somebody else
                    other = Task(run, task.target, task.files, bench.settings(run))
                    made_up(other, 20.0, weights).save(bench.path(run))
                done.append(task.run.name)
                yield Done(task, made_up(task, 10.0))

    console = quiet()
    run_bench(job, console, Slow())
    assert done == [bench.runs[0].name]
    assert f"{bench.runs[1].name}: 20.00 % error in 2.5 s" in said(console)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_processes_and_the_same_command_goes_on(
    signum: signal.Signals, code: int, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = [*ONE, f"seeds={list(range(200))}", "runs=[{methods: [test], protocol: N-O-SF}]"]
    arguments = [
        "bench",
        str(write_experiment(tmp_path)),
        "--out",
        str(tmp_path),
        "--cache",
        str(cache),
        "--set",
        *more,
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "ttac", *arguments]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    folder = tmp_path / "small/tiny"
    try:
        wait_for(lambda: len(list(folder.glob("n-o-sf-*.json"))) >= 3)
        children = list(children_of(process.pid))
        assert children
        process.send_signal(signum)
        error = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == code
    assert error == f"stopped; the same command goes on from what is in {folder}\n"
    wait_for(lambda: not any(is_alive(child) for child in children))
    done = {path: path.stat().st_mtime_ns for path in folder.glob("n-o-sf-*.json")}
    assert 3 <= len(done) < 200
    for path in done:
        assert Record.load(path).samples == 40
    assert not list(folder.glob("*.failed.json"))
    assert len(list(folder.iterdir())) == len(done) + 1  # experiment.json, and no half of anything
    monkeypatch.setattr(ttac.benchmark.job, "LocalProcesses", InlineExecutor)
    few = [*arguments, "--shard", "1/20"]  # the rest would be more of the same
    assert main(few) == 0
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert all((folder / f"n-o-sf-test-contrast-c10-c-5-seed-{seed}.json").exists() for seed in range(0, 200, 20))


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def children_of(process: int) -> Iterator[int]:
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            text = status.read_text()
        except OSError:
            continue
        if re.search(rf"^PPid:\s*{process}$", text, re.MULTILINE):
            yield int(status.parent.name)


# Shards and dry runs


def test_shards_are_disjoint_and_complete(tmp_path: Path, cache: Path) -> None:
    bench = Bench(BenchJob(EXPERIMENTS / "levels.yaml", tmp_path, "cpu", cache=cache))
    whole = sorted(run.name for run in bench.share)
    for parts in (2, 3, 40):
        found = []
        for part in range(1, parts + 1):
            bench.job = dataclasses.replace(bench.job, shard=(part, parts))
            found.append([run.name for run in bench.share])
        assert sorted(itertools.chain(*found)) == whole
        assert max(map(len, found)) - min(map(len, found)) <= 1


def test_a_shard_is_the_same_whatever_is_done(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ttac.benchmark.job, "LocalProcesses", InlineExecutor)
    file = write_experiment(tmp_path)
    for part in (1, 2):
        run_bench(BenchJob(file, tmp_path, "tiny", ONE, cache=cache, shard=(part, 2)), quiet())
        assert len(list((tmp_path / "small/tiny").glob("n-*"))) == (2, 3)[part - 1]


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_experiment(tmp_path)
    out, cache = tmp_path / "out", tmp_path / "cache"
    arguments = ["bench", str(file), "--dry-run", "--out", str(out), "--cache", str(cache)]
    assert main([*arguments, "--set", "seeds=[0, 1]"]) == 0
    told = capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    assert len(re.findall(r"│ n-o-s[fl]-\w+-[\w.-]+-seed-[01] +│ to do │ +│", told)) == 12
    assert "12 of 12 runs to do\n" in told
    assert "the source model plain is trained first" in told
    assert main([*arguments, "--shard", "2/5"]) == 0
    assert "1 of 1 runs to do" in capsys.readouterr().out


def test_a_dry_run_expects_what_runs_of_the_same_kind_took(tmp_path: Path) -> None:
    overrides = (*ONE, "seeds=[0, 1, 2, 3]", "runs=[{methods: [test, bn], protocol: N-O-SF}]")
    job = BenchJob(write_experiment(tmp_path), tmp_path, "tiny", overrides, cache=tmp_path, dry_run=True)
    bench = Bench(job)
    for run, seconds in zip(bench.runs, (1.0, 2.0, 6.0), strict=False):
        task = Task(run, TargetSpec("digits"), RunFiles("", None, ""), bench.settings(run))
        dataclasses.replace(made_up(task, 10.0), seconds=seconds).save(bench.path(run))
    console = quiet()
    run_bench(job, console)
    told = said(console)
    assert len(re.findall(r"│ done +│ +│", told)) == 3
    assert re.findall(r"to do +│ +(\S+) │", told) == ["2.0"], "the median of the method's other seeds"
    assert len(re.findall(r"│ to do +│ +│", told)) == 4, "of the other method nothing is known"
    assert "1 of them take about 0:00:02" in told


# The display


def test_what_is_shown_where_there_is_no_terminal() -> None:
    console = quiet()
    known = {"group": "", "row": "", "column": "", "protocol": "N-O-SL", "source": "plain", "method": "ttac",
             "target": "t", "domain": None, "severity": None, "seed": 0, "samples": 60}  # fmt: skip
    a, b, c = (Task(PlannedRun(name=name, **known), TargetSpec("digits"), RunFiles("", None, ""), {}) for name in "abc")
    display = Display(console, 3)
    with display.progress:
        for event in (
            *(Started(a), Progress(a, 20, 12.5), Done(a, made_up(a, 11.0))),
            *(Started(b), Progress(b, 20, None), Failed(b, "ValueError: [no] images")),
            *(Started(c), Progress(c, 40, 7.5)),
        ):
            display.show(event)
    lines = said(console).splitlines()
    assert lines[:2] == ["a: 11.00 % error in 2.5 s", "b failed: ValueError: [no] images"]
    assert re.search(r"2/3 +1 failed", lines[2])
    assert re.search(r"40/60 +7.50 % error", lines[3])
    assert len(lines) == 4
