"""Results are read strictly: what is missing or failed is told, what is broken or foreign is refused by name."""

from __future__ import annotations

import json
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
    ("change", "said"),
    [
        (lambda c: c.update(format="other/1"), "not of the format ttac.record/1"),
        (lambda c: c.update(error=None), "without labels"),
        (lambda c: c.update(error="20"), "not a whole record"),
        (lambda c: c.update(error=120.0), "percentages"),
        (lambda c: c.update(error=float("nan")), "percentages"),
        (lambda c: c.update(seconds=float("inf")), "percentages"),
        (lambda c: c.update(samples=0), "at least one sample"),
        (lambda c: c.pop("samples"), "not a whole record"),
        (lambda c: c.update(cumulative_error=[[1]]), "not a whole record"),
        (lambda c: c.update(provenance={}), "does not say which run"),
        (lambda c: c["provenance"]["run"].update(name="another"), "which is not its place"),
        (lambda c: c["provenance"]["run"].update(scale="paper"), "which is not its place"),
        (lambda c: c["provenance"]["run"].update(seed="0"), "seed must be of type int"),
        (lambda c: c["provenance"]["run"].update(seed=True), "seed must be of type int"),
        (lambda c: c["provenance"]["run"].update(column="C100-C"), "no parts of the column 'C100-C'"),
        (lambda c: c["provenance"]["run"].update(domain=["fog"]), "domain must be of type str"),
    ],
)
def test_a_record_that_is_not_one_is_refused_by_name(tmp_path: Path, change: Any, said: str) -> None:
    run = place("N-O-SF", "BN", "C10-C")
    folder = write_results(tmp_path, "protocols", [(run, made_up(run))])
    edited(folder / f"{run['name']}.json", change)
    with pytest.raises(ValueError, match=said) as caught:
        load_results(tmp_path)
    assert run["name"] in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c.update(format="ttac.experiment/2"), "not of the format"),
        (lambda c: c.update(name="../../etc"), "which is not its folder"),
        (lambda c: c.update(scale="paper"), "which is not its folder"),
        (lambda c: c.update(metric="accuracy"), "the metric is one of"),
        (lambda c: c.update(figures=["pie"]), "figures are some of"),
        (lambda c: c.update(runs=["../../secret"]), "without folders"),
        (lambda c: c.update(runs=[".hidden"]), "without folders"),
        (lambda c: c.update(runs=["a", "a"]), "different names"),
        (lambda c: c.update(runs=[1]), "runs must be a list of texts"),
        (lambda c: c.pop("parts"), "run ttac bench again, which rewrites it"),
        (lambda c: c.update(parts={"C10-C": [["C10-C", "fog"]]}), "parts must give the target, domain and severity"),
        (lambda c: c.update(average="yes"), "average must be of type bool"),
    ],
)
def test_an_experiment_that_is_not_one_is_refused_by_name(tmp_path: Path, change: Any, said: str) -> None:
    run = place("N-O-SF", "BN", "C10-C")
    folder = write_results(tmp_path, "protocols", [(run, made_up(run))])
    edited(folder / "experiment.json", change)
    with pytest.raises(ValueError, match=said) as caught:
        load_results(tmp_path)
    assert "experiment.json" in str(caught.value)


def test_names_that_would_leave_the_report_are_refused(tmp_path: Path) -> None:
    run = place("N-O-SF", "BN", "C10-C")
    write_results(tmp_path, "a b<c>", [(run, made_up(run))])
    with pytest.raises(ValueError, match="names of experiments and scales are letters"):
        load_results(tmp_path)


def test_broken_files_are_named(tmp_path: Path) -> None:
    run = place("N-O-SF", "BN", "C10-C")
    folder = write_results(tmp_path, "protocols", [(run, made_up(run))])
    points = folder / f"{run['name']}.tsne.json"
    points.write_text(json.dumps({"format": "ttac.points/1", "points": [[0, 1]], "labels": [0, 1]}))
    with pytest.raises(ValueError, match=r"tsne\.json must have as many labels"):
        load_results(tmp_path)
    points.write_text("[[[")
    with pytest.raises(ValueError, match=r"tsne\.json is not JSON"):
        load_results(tmp_path)
    points.unlink()
    broken_json(folder / f"{run['name']}.json")
    with pytest.raises(ValueError, match=r"BN-C10-C-fog-0\.json is not JSON"):
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
