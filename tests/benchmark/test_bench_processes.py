"""`ttac bench` in processes: what becomes of those that die, of signals, of shards, and what is said meanwhile."""

from __future__ import annotations

import dataclasses
import io
import itertools
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import ttac.benchmark.job
from bench_helpers import EXPERIMENTS, InlinePool, shared_cache, write_experiment
from ttac.benchmark.display import Display
from ttac.benchmark.estimate import Estimator, ForwardTimes, forwards
from ttac.benchmark.execute import Task
from ttac.benchmark.experiment import Experiment, SourceSpec, TargetSpec, load_experiment
from ttac.benchmark.ingredients import Ingredients
from ttac.benchmark.job import Bench, BenchJob, run_bench
from ttac.benchmark.pool import Event, Pool
from ttac.benchmark.runs import Run
from ttac.cli import main
from ttac.evaluation.records import Record

ONE = ("targets.C10-C.corruptions=[contrast]", "targets.C10-C.samples=40")


def work(task: str, report: Callable[[Any], None]) -> Any:
    """Do what a task says, in a worker."""
    report(f"at {task}")
    if task == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "half":  # a message of a hundred bytes of which three arrive
        pipe = report.__closure__[0].cell_contents  # type: ignore[attr-defined]
        os.write(pipe.fileno(), struct.pack("!i", 100) + b"abc")
        os._exit(4)
    if task == "raise":
        raise KeyError("surprise")
    return task.upper(), torch.get_num_threads(), os.getpid()


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_cache(tmp_path_factory)


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# Processes


def test_a_worker_that_dies_fails_its_task_alone() -> None:
    events = list(Pool(work, 1, 2).run(["a", "raise", "kill", "half", "b"]))
    assert [event.task for event in events if event.kind == "started"] == ["a", "raise", "kill", "half", "b"]
    assert [event.value for event in events if event.kind == "progress"] == [
        f"at {task}" for task in ("a", "raise", "kill", "half", "b")
    ]
    ended = {event.task: event for event in events if event.kind in ("done", "failed")}
    assert ended["a"].value[:2] == ("A", 2)
    assert ended["b"].value[:2] == ("B", 2)
    assert ended["raise"].value[0] == "KeyError: 'surprise'"
    assert "in work" in ended["raise"].value[1]  # the traceback
    assert ended["kill"].value == ("the process was ended by SIGKILL, perhaps for want of memory", "")
    assert ended["half"].value == ("the process ended with the code 4", "")
    assert not is_alive(ended["b"].value[2])


def test_a_worker_that_died_while_idle_is_replaced() -> None:
    events = Pool(work, 1, 1).run(["a", "b"])
    first = next(event for event in events if event.kind == "done")
    os.kill(first.value[2], signal.SIGKILL)
    wait_for(lambda: not is_alive(first.value[2]))
    (second,) = [event for event in events if event.kind in ("done", "failed")]
    assert second.value[0] == "B"


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
    monkeypatch.setattr(ttac.benchmark.job, "Pool", InlinePool)
    run_bench(BenchJob(file, tmp_path / "one", overrides=ONE, cache=cache), quiet())
    names = [path.name for path in sorted((tmp_path / "one/small/tiny").glob("n-*"))]
    assert len(names) == 3
    for name in names:
        one, two = (Record.load(tmp_path / folder / "small/tiny" / name) for folder in ("one", "two"))
        assert (one.error, one.cumulative_error) == (two.error, two.cumulative_error)
        assert two.provenance["command"] == one.provenance["command"]  # of the process that was called
        assert two.provenance["threads"] == torch.get_num_threads()
        assert f"{name[:-5]}: {two.error:.2f} % error in" in said(console)


@pytest.mark.parametrize(("jobs", "threads", "expected"), [(1, None, 4), (2, None, 2), (9, None, 1), (2, 3, 3)])
def test_threads_are_divided(
    jobs: int, threads: int | None, expected: int, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class Counted(InlinePool):
        def __init__(self, work: Any, jobs: int, threads: int) -> None:
            super().__init__(work, jobs, threads)
            asked.append((jobs, threads))

    monkeypatch.setattr(ttac.benchmark.job, "Pool", Counted)
    overrides = (*ONE, "runs=[{methods: [test, bn, t3a], protocol: N-O-SF}]")
    job = BenchJob(write_experiment(tmp_path), tmp_path, "tiny", overrides, cache=cache, jobs=jobs, threads=threads)
    Bench(job).pantry.prepare(Bench(job).runs, quiet())  # trained with as many threads as ever
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    run_bench(job, quiet())
    assert asked == [(min(jobs, 3), expected)]


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
    monkeypatch.setattr(ttac.benchmark.job, "Pool", InlinePool)
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
    monkeypatch.setattr(ttac.benchmark.job, "Pool", InlinePool)
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
    assert len(re.findall(r"│ n-o-s[fl]-\w+-[\w.-]+-seed-[01] +│ +60 │ to do │ +\d+\.\d │", told)) == 12
    assert re.search(r"^12 of 12 runs to do: about \d+ s on one process$", told, re.MULTILINE)
    assert "the source model plain is trained first, which is not counted" in told
    assert main([*arguments, "--shard", "2/5"]) == 0
    assert "1 of 1 runs to do" in capsys.readouterr().out


# Estimates and the display


def a_run(name: str, method: str = "ttac", **more: Any) -> Run:
    options = {"window": 20, "queue": 0, "passes": 1}
    known = {"name": name, "group": "", "row": "", "column": "", "protocol": "N-O-SL", "source": "plain"}
    return Run(**{**known, "method": method, "target": "t", "domain": None, "severity": None, "seed": 0,
                  "options": options, **more})  # fmt: skip


def a_record(samples: int, seconds: float) -> Record:
    return Record(samples, 1.0, [], [], {}, seconds, 0.0, 0.0, {}, {})


def test_runs_take_as_long_as_their_kind_took() -> None:
    measured = [(a_run(str(seed), seed=seed), a_record(100, seconds)) for seed, seconds in enumerate((1.0, 2.0, 6.0))]
    estimator = Estimator(measured, lambda source: 0.001)
    assert estimator.seconds(a_run("x", seed=9, domain="fog"), 50) == pytest.approx(50 * 0.02)  # the median
    # Of others nothing is known but a forward pass: one to predict, and 4 to learn, times passes and the queue's share.
    assert estimator.seconds(a_run("x", options={"window": 20, "queue": 0, "passes": 3}), 50) == pytest.approx(
        50 * 0.001 * (1 + 4 * 3)
    )
    queue = a_run("x", options={"window": 20, "queue": 100, "passes": 2})
    assert estimator.seconds(queue, 1000) == pytest.approx(1000 * 0.001 * (1 + 4 * 2 * 5))
    assert estimator.seconds(queue, 120) == pytest.approx(120 * 0.001 * (1 + 4 * 2 * 3))  # 60 at a time on average
    assert estimator.seconds(a_run("x", epochs=3, protocol="N-M-SL"), 50) == pytest.approx(50 * 0.001 * (1 + 4 * 3))
    assert estimator.seconds(a_run("x", method="test", options={}), 50) == pytest.approx(50 * 0.001)


def test_a_preset_counts_in_the_estimate() -> None:
    assert forwards(a_run("x", preset="paper", options={}), 10**6) == 1 + 4 * 4 * 4096 / 256


def test_a_forward_pass_is_timed_once_for_a_network_at_its_size() -> None:
    experiment = load_experiment(EXPERIMENTS / "protocols.yaml", "tiny")
    times = ForwardTimes(experiment)
    assert 0 < times("plain") < 1
    assert times("plain") == times("contrastive")  # which starts from it
    large = {"large": SourceSpec("elsewhere", arch="resnet8", arch_options={"width": 4}, size=128)}
    seen: list[torch.Size] = []
    forward = torch.nn.Conv2d.forward
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.nn.Conv2d, "forward", lambda self, x: seen.append(x.shape) or forward(self, x))
        assert ForwardTimes(Experiment("", [], large, {}))("large") > 0
    assert seen[0] == (16, 3, 128, 128)


def test_what_is_shown_where_there_is_no_terminal() -> None:
    console = quiet()
    tasks = [
        Task(a_run(name, samples=60), TargetSpec("digits"), Ingredients("", None, ""), {}, Path("x")) for name in "ab"
    ]
    with Display(console, {"a": 30.0, "b": None}, jobs=2) as display:
        display.show(Event(0, tasks[0], "started"))
        display.show(Event(0, tasks[0], "progress", (20, 12.5)))
        display.show(Event(1, tasks[1], "started"))
        display.show(Event(1, tasks[1], "progress", (20, None)))
        display.show(Event(0, tasks[0], "done", (11.0, 3.25)))
        display.show(Event(1, tasks[1], "failed", ("ValueError: [no] images", "")))
    lines = said(console).splitlines()
    assert lines[:2] == ["a: 11.00 % error in 3.2 s", "b failed: ValueError: [no] images"]
    assert "2/2" in lines[2]
    assert "about 0 s left, 1 failed" in lines[2]
    assert "20/60 12.50 % error" in lines[3]


def test_the_time_left_is_known_from_the_start() -> None:
    console = quiet()
    with Display(console, {"a": 300.0, "b": None, "c": 500.0}, jobs=2):
        pass
    assert "0/3" in said(console)
    assert "about 10 min left" in said(console)  # 300 + 400 + 500 seconds by two
