"""What tests of `ttac bench` share: experiments made small, and an executor without processes."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pytest

from ttac.benchmark.execute import execute
from ttac.benchmark.executor import Done, Event, Failed, Progress, Started, Task, described
from ttac.benchmark.experiment import load_experiment
from ttac.benchmark.job import BenchJob

PARTS = {
    "development": 11,
    "thresholds": 5,
    "rates": 3,
    "time": 3,
}  # shards, of which one is enough: of grids, and of the runs of queue
NARROW = {"resnet8": 4, "vit_small_32": 24}  # width by network

TINY = """
title: A small one
column: "{domain}"
sources:
  plain: {data: digits, arch: resnet8, arch_options: {width: 4, stem_stride: 2}, epochs: 1, batch: 64}
targets:
  C10-C: {data: digits, corruptions: [gaussian_noise, contrast], severities: [5], samples: 60, batch: 20}
options: {window: 20, queue: 0, passes: 1}
runs:
  - {methods: [test, tent], protocol: N-O-SF}
  - {methods: [ttac], protocol: N-O-SL}
scales:
  tiny: {}
  cpu: {options: {window: 40}, targets: {C10-C: null, digits: {data: digits, samples: null}}}
"""


class InlineExecutor:
    """Does tasks one after another in this process; `Bench` must not notice."""

    def __init__(self, *_: Any) -> None:
        """Take what `LocalProcesses` takes, of which nothing matters here."""

    def run(self, tasks: Iterable[Task]) -> Generator[Event, None, None]:
        """Do all tasks."""
        for task in tasks:
            yield Started(task)
            told: list[Any] = []
            try:
                last: Event = Done(task, *execute(task, lambda *news, told=told: told.append(news)))
            except Exception as error:
                last = Failed(task, described(error), "traceback")
            yield from (Progress(task, *news) for news in told)
            yield last


def shared_cache(factory: pytest.TempPathFactory) -> Path:
    """Give one folder for the processes of pytest-xdist, in which each source is trained once."""
    base = factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "bench-cache"


def write_experiment(folder: Path, text: str = TINY) -> Path:
    """Write an experiment's file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "small.yaml").write_text(text)
    return folder / "small.yaml"


def small_job(file: Path, out: Path, cache: Path) -> BenchJob:
    """Describe the bench of an experiment at the scale tiny, with overrides that make it smaller still."""
    experiment = load_experiment(file, "tiny")
    overrides = ["options.window=20"]
    for name, source in experiment.sources.items():
        overrides.append(f"sources.{name}.epochs=1")
        if source.arch is not None:
            overrides.append(f"sources.{name}.arch_options.width={NARROW[source.arch]}")
    for name, target in experiment.targets.items():
        smaller = {
            "samples": 40,
            "batch": 20,
            "corruptions": target.corruptions[:1],
            "severities": target.severities[:2],
        }
        overrides += [f"targets.{name}.{key}={value}" for key, value in smaller.items()]
    return BenchJob(file, out, cache=cache, overrides=tuple(overrides), shard=(1, PARTS.get(file.stem, 1)))
