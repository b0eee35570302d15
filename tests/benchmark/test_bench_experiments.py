"""The experiments that come with the project: each expands at every scale, meets the paper's names, and runs."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path

import pytest
import torch
from rich.console import Console

import ttac.benchmark.job
from bench_helpers import InlineExecutor, shared_cache, small_job
from ttac.adaptation.memory import SampleQueue
from ttac.benchmark.experiment import EXPERIMENTS, Experiment, load_experiment
from ttac.benchmark.job import Bench, run_bench
from ttac.benchmark.report.published import PublishedTable, published_tables
from ttac.benchmark.runs import PlannedRun, expand
from ttac.data.corruptions import CORRUPTIONS, EXTRA
from ttac.data.sets.specs import SPECS
from ttac.evaluation.records import Record
from ttac.methods.registry import methods
from ttac.model.inputs import ImageInput

FILES = sorted(EXPERIMENTS.glob("*.yaml"))
LARGE = ("cpu", "paper")
SCHEDULE = ("queue", "walk", "passes")
# (group, row) that the paper lacks, and those of the paper that are not run; its reason stands in the experiment.
BEYOND = {
    "protocols": {("N-O-SF", "AdaContrast"), ("N-M-SF", "AdaContrast"), ("N-M-SF", "Self-Training")},
    "adversarial": {("-", "TEST (contrastive source)")},
    "queue": {("-", "TEST")},
}
LEFT_OUT = {"vit": {("N-O-SF", "BN")}}
# Columns of the paper without a run at the scale cpu.
FEWER_COLUMNS = {"protocols": {"C100-C", "C10.1"}}
every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


@cache
def expanded(file: Path, scale: str) -> tuple[Experiment, list[PlannedRun]]:
    experiment = load_experiment(file, scale)
    return experiment, expand(experiment)


def tables(experiment: Experiment) -> list[PublishedTable]:
    return [published_tables()[name] for name in experiment.published]


def test_every_table_of_the_paper_has_an_experiment() -> None:
    named = {name for file in FILES for name in load_experiment(file, "cpu").published}
    assert named == set(published_tables()) - {"queue-imagenet"}  # half of a table, of which the other one is run


@every_file
@pytest.mark.parametrize("scale", ["tiny", *LARGE])
def test_it_expands_at_every_scale(file: Path, scale: str) -> None:
    experiment, runs = expanded(file, scale)
    assert experiment.title
    assert experiment.about
    assert file.read_text().startswith(f"# ttac bench {file.stem} --scale ")
    assert len({run.name for run in runs}) == len(runs)
    for run in runs:
        assert run.protocol in methods()[run.method].capabilities.protocols
        assert run.source in experiment.sources
        assert (run.statistics is None) == ("statistics" not in methods()[run.method].capabilities.needs)
    data = {spec.data for spec in (*experiment.sources.values(), *experiment.targets.values())}
    assert data <= ({"digits", "glyphs"} if scale == "tiny" else set(SPECS))


@every_file
@pytest.mark.parametrize("scale", ["tiny", *LARGE])
def test_all_rows_of_a_table_predict_at_the_same_moment(file: Path, scale: str) -> None:
    """Adapt on the window, then predict it, as the paper's numbers were made; TEST adapts to nothing."""
    _, runs = expanded(file, scale)
    for run in runs:
        method = methods()[run.method]
        chosen = method.presets[run.preset] if run.preset else {}
        options = method.options_type(**{**chosen, **run.options})
        assert getattr(options, "predict", None) == (None if run.method == "test" else "after"), run.name


@every_file
@pytest.mark.parametrize("scale", LARGE)
def test_its_rows_are_those_of_the_paper(file: Path, scale: str) -> None:
    experiment, runs = expanded(file, scale)
    ours = {(run.group, run.row) for run in runs}
    for table in tables(experiment):
        theirs = {(row.group, row.row) for row in table.rows}
        assert ours - theirs == BEYOND.get(table.name, set())
        assert theirs - ours == LEFT_OUT.get(table.name, set())
        assert table.metric == experiment.metric


@every_file
@pytest.mark.parametrize("scale", LARGE)
def test_its_columns_are_those_of_the_paper(file: Path, scale: str) -> None:
    experiment, runs = expanded(file, scale)
    for table in tables(experiment):
        if experiment.by_class:
            continue
        fewer = FEWER_COLUMNS.get(table.name, set()) if scale == "cpu" else set()
        assert {run.column for run in runs} == set(table.columns) - fewer
        for run in runs:
            known = (run.group, run.row) not in BEYOND.get(table.name, set())
            assert (table.value(run.group, run.row, run.column) is not None) == known, run.name
        cells = {(run.group, run.row, run.column) for run in runs}
        for row in table.rows:
            if (row.group, row.row) in LEFT_OUT.get(table.name, set()) or (row.group, table.metric) == ("-", "seconds"):
                continue  # the paper repeats the time of inference in every column
            printed = {column for column, value in zip(table.columns, row.values, strict=True) if value is not None}
            assert {(row.group, row.row, column) for column in printed - fewer} <= cells


@every_file
def test_classes_of_the_paper_are_the_columns_at_its_scale(file: Path) -> None:
    experiment, _ = expanded(file, "paper")
    for table in tables(experiment):
        if experiment.by_class:
            (target,) = experiment.targets.values()
            assert SPECS[target.data].classes == table.columns
            assert experiment.average


@pytest.mark.parametrize("name", ["clusters", "corruptions", "vit"])
@pytest.mark.parametrize("scale", LARGE)
def test_corruptions_come_in_their_order(name: str, scale: str) -> None:
    _, runs = expanded(EXPERIMENTS / f"{name}.yaml", scale)
    assert tuple(dict.fromkeys(run.column for run in runs)) == CORRUPTIONS
    assert {run.severity for run in runs} == {5}


def test_the_protocol_table_averages_the_fifteen_corruptions_for_each_seed() -> None:
    _, runs = expanded(EXPERIMENTS / "protocols.yaml", "cpu")
    cell = [run for run in runs if (run.group, run.row, run.column) == ("N-O-SL", "TTAC++", "C10-C")]
    assert {(run.domain, run.seed) for run in cell} == {(name, seed) for name in CORRUPTIONS for seed in (0, 1, 2)}
    assert len(cell) == 45
    assert {run.severity for run in cell} == {5}


def test_development_streams_are_none_that_the_tables_have() -> None:
    experiment, runs = expanded(EXPERIMENTS / "development.yaml", "cpu")
    shifted = {(run.domain, run.severity) for run in runs if run.target == "C10-C"}
    assert shifted == {(name, 5) for name in EXTRA}
    mild = {(run.target, run.domain, run.severity) for run in runs if run.target != "C10-C"}
    assert mild == {
        ("clean", None, None), ("jpeg-30", "jpeg_compression", None), ("brightness-1", "brightness", 1),
        ("low-contrast", "contrast", 2),
    }  # fmt: skip
    assert experiment.targets["jpeg-30"].strength == [30]
    assert {run.options.get("predict") for run in runs if run.method != "test"} == {"after"}
    assert {run.samples for run in runs} == {5120}
    assert {(run.channels_last, run.autocast) for run in runs} == {(True, "bfloat16")}
    places = {(run.group, run.row, run.source, run.column, run.part) for run in runs}
    assert len(places) == len(runs)


def test_development_runs_take_one_step_a_window_or_four() -> None:
    _, runs = expanded(EXPERIMENTS / "development.yaml", "cpu")
    schedules = {(run.column.rpartition(", ")[2], *map(run.options.get, SCHEDULE)) for run in runs if run.options}
    assert schedules == {("1 step", 0, 0, 1), ("4 steps", 4096, 1024, 1)}
    queue = SampleQueue(4096, ImageInput(None, None, 1))
    steps = []
    for window in range(20):
        queue.push(torch.zeros(256, 1, 1, 1))
        batches = list(queue.minibatches(256, torch.Generator().manual_seed(window), walk=1024))
        assert set(queue.newest(256).tolist()) <= set(torch.cat(batches).tolist())
        assert {len(batch) for batch in batches} == {256}
        steps.append(len(batches))
        queue.settle()
    assert steps == [1, 2, 3, *[4] * 17]


@every_file
def test_it_runs_when_it_is_tiny(
    file: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ttac.benchmark.job, "LocalProcesses", InlineExecutor
    )  # processes are the business of other tests
    job = small_job(file, tmp_path, shared_cache(tmp_path_factory))
    run_bench(job, Console(file=io.StringIO()))
    bench = Bench(job)
    assert bench.remaining == []
    for run in bench.share:
        record = Record.load(bench.path(run))
        assert record.error is not None, run.name
        assert 0 <= record.error <= 100
        assert record.samples == 40
        assert record.provenance["run"]["name"] == run.name
        assert bench.path(run).with_suffix(".tsne.json").exists() == (run.features > 0)
    described = json.loads((bench.folder / "experiment.json").read_text())
    assert described["runs"] == [run.name for run in bench.runs]
    assert described["name"] == file.stem
    assert sorted(described["classes"]) == [str(number) for number in range(10)]


def test_points_are_those_of_the_stream(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    job = small_job(EXPERIMENTS / "tsne.yaml", tmp_path, shared_cache(tmp_path_factory))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ttac.benchmark.job, "LocalProcesses", InlineExecutor)
        run_bench(job, Console(file=io.StringIO()))
    bench = Bench(job)
    points = [json.loads(bench.path(run).with_suffix(".tsne.json").read_text()) for run in bench.runs]
    assert {one["format"] for one in points} == {"ttac.points/1"}
    assert all(len({tuple(place) for place in one["points"]}) == 40 for one in points)
    labels = [one["labels"] for one in points]
    assert labels[0] == labels[1] == labels[2]  # all methods saw the same samples in the same order
    errors = Record.load(bench.path(bench.runs[0])).class_error
    assert set(labels[0]) == {number for number, error in enumerate(errors) if error is not None}
