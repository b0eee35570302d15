"""Results are read strictly: what is missing or failed is told, what is broken or foreign is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_helpers import made_up, place, write_failure, write_results

from ttac.benchmark.report.results import load_results


def edited(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_runs_may_be_done_failed_or_missing(tmp_path: Path) -> None:
    runs = [place("N-O-SF", row, "C10-C") for row in ("BN", "TENT", "SHOT")]
    folder = write_results(tmp_path, "protocols", [(runs[0], made_up(runs[0], 12.5)), (runs[1], None), (runs[2], None)])
    write_failure(folder, runs[1], "ValueError: no")
    (experiment,), notes = load_results(tmp_path)
    assert [done.record.error for done in experiment.done] == [12.5]
    assert [(failure.run.row, failure.error) for failure in experiment.failed] == [("TENT", "ValueError: no")]
    assert not experiment.complete
    assert [run.row for run in experiment.places] == ["BN", "TENT"]
    assert notes == []


def test_a_record_outweighs_the_failure_of_an_earlier_attempt(tmp_path: Path) -> None:
    run = place("N-O-SF", "BN", "C10-C")
    folder = write_results(tmp_path, "protocols", [(run, made_up(run))])
    write_failure(folder, run, "killed")
    (experiment,), notes = load_results(tmp_path)
    assert experiment.complete
    assert not experiment.failed
    assert not notes


def test_scales_are_apart_and_strays_are_told(tmp_path: Path) -> None:
    for scale in ("tiny", "cpu"):
        run = place("N-O-SF", "BN", "C10-C")
        folder = write_results(tmp_path, "protocols", [(run, made_up(run))], scale)
    (folder / "old-run.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "x.json").write_text("{}")
    experiments, notes = load_results(tmp_path)
    assert sorted(experiment.key for experiment in experiments) == ["protocols-cpu", "protocols-tiny"]
    assert len(notes) == 2
    assert "old-run.json is no run of the experiment" in notes[0]
    assert "notes has no experiment.json" in notes[1]


def test_some_experiments_can_be_chosen(tmp_path: Path) -> None:
    for name in ("order", "levels"):
        run = place("N-O-SF", "BN", "C10-C")
        write_results(tmp_path, name, [(run, made_up(run))])
    experiments, _ = load_results(tmp_path, ["levels"])
    assert [experiment.name for experiment in experiments] == ["levels"]
    with pytest.raises(ValueError, match=r"no results of visda in .*; there are levels, order"):
        load_results(tmp_path, ["visda"])


def test_without_results_the_error_names_the_command_that_makes_them(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run ttac bench first"):
        load_results(tmp_path)
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        load_results(tmp_path / "nowhere")


def broken_json(path: Path) -> None:
    path.write_text(path.read_text()[:-20])


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(format="other/1"),
        lambda c: c.update(error=None),
        lambda c: c.update(error="20"),
        lambda c: c.update(error=120.0),
        lambda c: c.update(error=float("nan")),
        lambda c: c.update(seconds=float("inf")),
        lambda c: c.update(samples=0),
        lambda c: c.update(latency_ms={"update": {"mean": "long"}}),
        lambda c: c.update(latency_ms=[]),
        lambda c: c.pop("samples"),
        lambda c: c.update(cumulative_error=[[1]]),
        lambda c: c.update(provenance={}),
        lambda c: c["provenance"]["run"].update(name="another"),
        lambda c: c["provenance"]["run"].update(scale="paper"),
        lambda c: c["provenance"]["run"].update(seed="first"),
        lambda c: c["provenance"]["run"].update(seed=True),
        lambda c: c["provenance"]["run"].update(column="C100-C"),
        lambda c: c["provenance"]["run"].update(domain=["fog"]),
    ],
)
def test_a_record_that_is_not_one_is_refused_by_name(tmp_path: Path, change: Any) -> None:
    run = place("N-O-SF", "BN", "C10-C")
    folder = write_results(tmp_path, "protocols", [(run, made_up(run))])
    edited(folder / f"{run['name']}.json", change)
    with pytest.raises(ValueError, match=re.escape(f"{run['name']}.json")):
        load_results(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(format="ttac.experiment/2"),
        lambda c: c.update(name="../../etc"),
        lambda c: c.update(scale="paper"),
        lambda c: c.update(metric="accuracy"),
        lambda c: c.update(figures=["pie"]),
        lambda c: c.update(runs=["../../secret"]),
        lambda c: c.update(runs=[".hidden"]),
        lambda c: c.update(runs=["a", "a"]),
        lambda c: c.update(runs=[1]),
        lambda c: c.pop("parts"),
        lambda c: c.update(parts={"C10-C": [["C10-C", "fog"]]}),
        lambda c: c.update(average="often"),
    ],
)
def test_an_experiment_that_is_not_one_is_refused_by_name(tmp_path: Path, change: Any) -> None:
    run = place("N-O-SF", "BN", "C10-C")
    folder = write_results(tmp_path, "protocols", [(run, made_up(run))])
    edited(folder / "experiment.json", change)
    with pytest.raises(ValueError, match=r"experiment\.json"):
        load_results(tmp_path)


def test_names_that_would_leave_the_report_are_refused(tmp_path: Path) -> None:
    run = place("N-O-SF", "BN", "C10-C")
    write_results(tmp_path, "a b<c>", [(run, made_up(run))])
    with pytest.raises(ValueError, match="names of experiments, scales and tables are letters"):
        load_results(tmp_path)


def test_broken_files_are_named(tmp_path: Path) -> None:
    run = place("N-O-SF", "BN", "C10-C")
    folder = write_results(tmp_path, "protocols", [(run, made_up(run))])
    points = folder / f"{run['name']}.tsne.json"
    points.write_text(json.dumps({"format": "ttac.points/1", "points": [[0, 1]], "labels": [0, 1]}))
    with pytest.raises(ValueError, match=r"tsne\.json"):
        load_results(tmp_path)
    points.write_text("[[[")
    with pytest.raises(ValueError, match=r"tsne\.json"):
        load_results(tmp_path)
    points.unlink()
    broken_json(folder / f"{run['name']}.json")
    with pytest.raises(ValueError, match=r"BN-C10-C-fog-0\.json"):
        load_results(tmp_path)


def test_classes_must_be_those_of_the_experiment(tmp_path: Path) -> None:
    run = place("N-O-SF", "BN", "VisDA-C")
    record = made_up(run, class_error=[1.0, 2.0, 3.0])
    write_results(tmp_path, "visda", [(run, record)], by_class=True, classes=["bus", "car"])
    with pytest.raises(ValueError, match="errors of 3 classes"):
        load_results(tmp_path)


@pytest.mark.parametrize("errors", [[], [None, None]])
def test_a_table_by_class_needs_errors_of_classes(tmp_path: Path, errors: list[float | None]) -> None:
    run = place("N-O-SF", "BN", "VisDA-C")
    write_results(tmp_path, "visda", [(run, made_up(run, class_error=errors))], by_class=True, average=True)
    with pytest.raises(ValueError, match=r"VisDA-C-fog-0\.json has no error of any class"):
        load_results(tmp_path)


def test_keys_of_other_versions_are_no_mistake(tmp_path: Path) -> None:
    run = place("N-O-SF", "BN", "C10-C", compile=None)
    folder = write_results(tmp_path, "protocols", [(run, made_up(run))], later="unknown")
    points = {"format": "ttac.points/1", "points": [[0, 1]], "labels": [0], "predictions": [1]}
    (folder / f"{run['name']}.tsne.json").write_text(json.dumps(points))
    (experiment,), _ = load_results(tmp_path)
    assert experiment.done[0].points is not None
    assert experiment.done[0].points.points.tolist() == [[0.0, 1.0]]
