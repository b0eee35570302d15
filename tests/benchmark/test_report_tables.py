"""The numbers of a table, against the standard library and plain loops over what the records hold."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_helpers import made_up, place, write_failure, write_results

from ttac.benchmark.report.orders import Ordering, compare_order, paired_differences, standard_error
from ttac.benchmark.report.published import PublishedRow, PublishedTable
from ttac.benchmark.report.results import by_table, load_results
from ttac.benchmark.report.tables import Table, make_table


def table_of(tmp_path: Path, published: Mapping[str, PublishedTable] | None = None) -> Table:
    (experiment,), _ = load_results(tmp_path)
    return make_table(experiment, published or {})


def paper(columns: tuple[str, ...], rows: dict[tuple[str, str], tuple[float, ...]], **more: Any) -> PublishedTable:
    lines = tuple(
        PublishedRow(group, row, values, round(statistics.fmean(values), 2), more.get("spread"))
        for (group, row), values in rows.items()
    )
    return PublishedTable("p", "A table.", "Table 1, tab:p", more.get("metric", "error"), columns, lines, "")


def swapped(ordering: Ordering) -> list[tuple[str, str]]:
    return [(ahead.row.title, behind.row.title) for _, ahead, behind in ordering.swaps]


def test_domains_are_averaged_before_seeds(tmp_path: Path) -> None:
    random.seed(1)
    errors = {(seed, domain): random.uniform(5, 60) for seed in range(3) for domain in ("fog", "snow", "frost")}
    runs = []
    for (seed, domain), error in errors.items():
        run = place("N-O-SF", "BN", "C10-C", seed, domain)
        runs.append((run, made_up(run, error)))
    write_results(tmp_path, "protocols", runs)
    cell = table_of(tmp_path).rows[0].cells["C10-C"]
    by_seed = [sum(errors[seed, domain] for domain in ("fog", "snow", "frost")) / 3 for seed in range(3)]
    assert cell.mean == pytest.approx(sum(by_seed) / 3)
    assert cell.std == pytest.approx(statistics.stdev(by_seed))
    assert (cell.n, len(cell.done), cell.whole, cell.over) == (3, 9, True, "seeds")


def test_one_seed_has_no_spread(tmp_path: Path) -> None:
    run = place("N-O-SF", "BN", "C10-C")
    write_results(tmp_path, "protocols", [(run, made_up(run, 31.0))])
    cell = table_of(tmp_path).rows[0].cells["C10-C"]
    assert (cell.mean, cell.std, cell.n) == (31.0, None, 1)
    assert not cell.best, "there is nothing that it is better than"


def test_the_average_is_over_columns_seed_by_seed(tmp_path: Path) -> None:
    errors = {("fog", 0): 10.0, ("fog", 1): 12.0, ("snow", 0): 20.0, ("snow", 1): 30.0}
    runs = []
    for (column, seed), error in errors.items():
        run = place("N-O-SF", "BN", column, seed, column)
        runs.append((run, made_up(run, error)))
    write_results(tmp_path, "corruptions", runs, average=True)
    table = table_of(tmp_path)
    assert table.columns == ("fog", "snow", "mean")
    cell = table.rows[0].cells["mean"]
    assert cell.mean == pytest.approx(18.0)
    assert cell.std == pytest.approx(statistics.stdev([15.0, 21.0]))


def test_columns_with_seeds_of_their_own_are_spread_over_columns(tmp_path: Path) -> None:
    runs = []
    for seed, error in ((0, 8.0), (10, 9.0), (20, 8.5)):
        run = place("N-O-SL", "TTAC++", str(seed), seed, "snow")
        runs.append((run, made_up(run, error)))
    write_results(tmp_path, "order", runs, average=True, published=["p"])
    published = {"p": paper(("0", "10", "20"), {("N-O-SL", "TTAC++"): (8.0, 9.0, 9.1)}, spread=0.2)}
    cell = table_of(tmp_path, published).rows[0].cells["mean"]
    assert (cell.mean, cell.over, cell.n) == (8.5, "columns", 3)
    assert cell.std == pytest.approx(statistics.stdev([8.0, 9.0, 8.5]))
    assert (cell.published, cell.published_std) == (8.7, 0.2)


def test_classes_can_be_the_columns(tmp_path: Path) -> None:
    runs = []
    for seed, errors in ((0, [10.0, None, 40.0]), (1, [20.0, None, 50.0])):
        run = place("N-O-SF", "BN", "VisDA-C", seed, None)
        runs.append((run, made_up(run, 33.0, class_error=errors)))
    write_results(tmp_path, "visda", runs, by_class=True, classes=["bus", "car", "truck"], average=True)
    table = table_of(tmp_path)
    assert table.columns == ("bus", "car", "truck", "mean")
    cells = table.rows[0].cells
    assert (cells["bus"].mean, cells["truck"].mean) == (15.0, 45.0)
    assert "car" not in cells
    assert cells["mean"].mean == 30.0
    assert cells["mean"].lacking == "2 of 3 columns"


def test_seconds_are_those_of_a_sample(tmp_path: Path) -> None:
    runs = []
    for row, seconds, samples in (("BN", 30.0, 10_000), ("TENT", 10.0, 2_000)):
        run = place("N-O-SF", row, "no queue")
        runs.append((run, made_up(run, samples=samples, seconds=seconds)))
    write_results(tmp_path, "time", runs, metric="seconds")
    table = table_of(tmp_path)
    assert [row.cells["no queue"].mean for row in table.rows] == [0.003, 0.005]
    assert [row.cells["no queue"].best for row in table.rows] == [True, False]


def test_tables_compare_with_a_method_on_the_same_streams(tmp_path: Path) -> None:
    random.seed(2)
    runs, errors, updates = [], {}, {}
    for source, domain, (group, row) in itertools.product(
        ("plain", "other"), ("fog", "snow"), (("-", "TEST"), ("N-O-SF", "BN"), ("N-O-SL", "TTAC"))
    ):
        run = place(group, f"{row}, {source}", "1 step", domain=domain, method=row.lower(), source=source)
        errors[row, source, domain], updates[row, source, domain] = random.uniform(5, 60), random.uniform(100, 900)
        latency = {"count": 0} if row == "TEST" else {"count": 5, "mean": updates[row, source, domain]}
        runs.append((run, made_up(run, errors[row, source, domain], latency_ms={"update": latency})))
    alone = place("N-O-SL", "TTAC, plain", "4 steps", method="ttac")  # BN has no such run
    names = [run["name"] for run, _ in runs]
    tables = {
        "harm": {"title": "harm", "against": "bn", "runs": [*names, alone["name"]]},
        "cost": {"title": "cost", "about": "Times.", "metric": "update", "against": "bn", "runs": names},
        "update": {"title": "update", "metric": "update", "runs": names[:3]},
    }
    write_results(tmp_path, "development", [*runs, (alone, made_up(alone))], tables=tables)
    (experiment,), _ = load_results(tmp_path)
    harm, cost, update = (make_table(part, {}) for part in by_table(experiment))
    assert [table.experiment.key for table in (harm, cost, update)] == [
        "development-tiny-harm", "development-tiny-cost", "development-tiny-update",
    ]  # fmt: skip
    for row in harm.rows:
        method, source = row.title.split(", ")
        differences = [errors[method, source, domain] - errors["BN", source, domain] for domain in ("fog", "snow")]
        assert row.cells["1 step"].mean == pytest.approx(sum(differences) / 2)
        assert "4 steps" not in row.cells
        assert not row.cells["1 step"].best
    assert [row.title for row in cost.rows] == ["BN, plain", "TTAC, plain", "BN, other", "TTAC, other"]
    for row in cost.rows:
        method, source = row.title.split(", ")
        multiples = [updates[method, source, domain] / updates["BN", source, domain] for domain in ("fog", "snow")]
        assert row.cells["1 step"].mean == pytest.approx(sum(multiples) / 2)
    assert [row.cells["1 step"].mean for row in update.rows] == [
        pytest.approx(updates[row, "plain", "fog"] / 1000) for row in ("BN", "TTAC")
    ]
    assert (harm.unit, harm.digits) == ("points of error above BN", 2)
    assert (cost.unit, cost.digits) == ("seconds an update, in multiples of BN's", 2)
    assert (update.unit, update.digits) == ("seconds an update", 4)
    assert (harm.experiment.about, cost.experiment.about) == ("Made up for a test.", "Times.")


def test_the_lowest_of_a_column_and_group_is_best_and_ties_are_shared(tmp_path: Path) -> None:
    errors = {("N-O-SF", "BN"): 20.001, ("N-O-SF", "TENT"): 20.004, ("N-O-SF", "SHOT"): 20.2, ("N-O-SL", "TTAC"): 30.0,
              ("N-O-SL", "TTAC++"): 29.0}  # fmt: skip
    runs = []
    for (group, row), error in errors.items():
        run = place(group, row, "C10-C")
        runs.append((run, made_up(run, error)))
    write_results(tmp_path, "protocols", runs)
    table = table_of(tmp_path)
    assert [row.title for row in table.rows if row.cells["C10-C"].best] == ["BN", "TENT", "TTAC++"]
    assert table.groups == ["N-O-SF", "N-O-SL"]


def test_a_mean_over_a_part_of_the_domains_is_marked_and_never_best(tmp_path: Path) -> None:
    runs = []
    for row, error, domains in (("BN", 20.0, 2), ("TENT", 21.0, 2), ("SHOT", 1.0, 1), ("T3A", 20.0, 1)):
        for index, domain in enumerate(("fog", "snow")):
            run = place("N-O-SF", row, "C10-C", 0, domain)
            runs.append((run, made_up(run, error) if index < domains else None))
    write_results(tmp_path, "protocols", runs, average=True)
    table = table_of(tmp_path)
    for column in ("C10-C", "mean"):
        cells = {row.title: row.cells[column] for row in table.rows}
        assert cells["SHOT"].lacking == cells["T3A"].lacking == "1 of 2 domains"
        assert cells["BN"].whole
        assert [title for title, cell in cells.items() if cell.best] == ["BN"]


def test_a_column_of_ties_has_no_best(tmp_path: Path) -> None:
    runs = [(run, made_up(run, 20.0)) for row in ("BN", "TENT") for run in [place("N-O-SF", row, "C10-C")]]
    write_results(tmp_path, "protocols", runs)
    assert not any(row.cells["C10-C"].best for row in table_of(tmp_path).rows)


def test_a_partial_mean_has_no_published_number_beside_it(tmp_path: Path) -> None:
    runs = []
    for row, domains in (("BN", 2), ("TENT", 1)):
        for index, domain in enumerate(("fog", "snow")):
            run = place("N-O-SF", row, "C10-C", 0, domain)
            runs.append((run, made_up(run) if index < domains else None))
    write_results(tmp_path, "protocols", runs, average=True, published=["p"])
    published = {"p": paper(("C10-C",), {("N-O-SF", "BN"): (14.0,), ("N-O-SF", "TENT"): (15.0,)}, spread=0.2)}
    bn, tent = table_of(tmp_path, published).rows
    assert [cell.published for cell in bn.cells.values()] == [14.0, 14.0]
    assert [(cell.published, cell.published_std) for cell in tent.cells.values()] == [(None, None)] * 2


def test_seeds_that_lack_a_domain_are_left_out_where_another_is_whole(tmp_path: Path) -> None:
    runs = []
    for seed, domain, error in ((0, "fog", 10.0), (0, "snow", 20.0), (1, "fog", 50.0)):
        run = place("N-O-SF", "BN", "C10-C", seed, domain)
        runs.append((run, made_up(run, error)))
    lacking = place("N-O-SF", "BN", "C10-C", 1, "snow")
    folder = write_results(tmp_path, "protocols", [*runs, (lacking, None)])
    write_failure(folder, lacking, "no")
    cell = table_of(tmp_path).rows[0].cells["C10-C"]
    assert (cell.mean, cell.n, cell.whole, len(cell.done)) == (15.0, 1, True, 2)


def test_a_domain_that_every_row_lacks_is_missed(tmp_path: Path) -> None:
    runs = [place("N-O-SF", "BN", "C10-C", 0, domain) for domain in ("fog", "snow", "frost")]
    records = [(runs[0], made_up(runs[0], 10.0)), (runs[1], None), (runs[2], None)]
    write_results(tmp_path, "protocols", records)
    assert table_of(tmp_path).rows[0].cells["C10-C"].lacking == "1 of 3 domains"


def test_rows_may_cover_different_domains_when_nothing_is_missing(tmp_path: Path) -> None:
    runs = []
    for group, row, domains in (("N-O-SF", "BN", ("fog", "snow")), ("N-M-SF", "BN", ("fog",))):
        for domain in domains:
            run = place(group, row, "C10-C", 0, domain)
            runs.append((run, made_up(run)))
    write_results(tmp_path, "protocols", runs)
    assert all(row.cells["C10-C"].whole for row in table_of(tmp_path).rows)


def test_the_published_mean_is_over_the_same_columns(tmp_path: Path) -> None:
    runs = [(run, made_up(run)) for run in (place("N-O-SF", "BN", column, 0, column) for column in ("fog", "snow"))]
    write_results(tmp_path, "corruptions", runs, average=True, published=["p"])
    published = {"p": paper(("fog", "snow", "frost"), {("N-O-SF", "BN"): (10.0, 20.0, 90.0)})}
    cells = table_of(tmp_path, published).rows[0].cells
    assert {column: cell.published for column, cell in cells.items()} == {"fog": 10.0, "snow": 20.0, "mean": 15.0}


def test_an_unknown_published_table_is_refused(tmp_path: Path) -> None:
    run = place("N-O-SF", "BN", "C10-C")
    write_results(tmp_path, "protocols", [(run, made_up(run))], published=["protokols"])
    with pytest.raises(ValueError, match="unknown published table of protocols-tiny: 'protokols'"):
        table_of(tmp_path, {"protocols": paper((), {})})


def test_order_counts_pairs_that_stand_the_same_are_undecided_or_swapped(tmp_path: Path) -> None:
    measured = {"BN": 30.0, "TENT": 25.0, "SHOT": 24.9, "TTAC++": 40.0}
    runs = [(run, made_up(run, measured[row])) for row in measured for run in [place("N-O-SF", row, "C10-C")]]
    write_results(tmp_path, "protocols", runs, published=["p"])
    rows = {
        ("N-O-SF", "BN"): (15.0,),
        ("N-O-SF", "TENT"): (14.0,),
        ("N-O-SF", "SHOT"): (14.5,),
        ("N-O-SF", "TTAC++"): (13.95,),
    }
    found = compare_order(table_of(tmp_path, {"p": paper(("C10-C",), rows)}))
    # TENT and TTAC++ are 0.05 apart in the paper, TENT and SHOT 0.1 here with a standard error of 1.9.
    assert (found.same, found.undecided, found.compared) == (2, 1, 5)
    assert swapped(found) == [("BN", "TTAC++"), ("SHOT", "TTAC++")]
    column, ahead, behind = found.swaps[0]
    assert (column, ahead.cell.mean, behind.cell.mean) == ("C10-C", 30.0, 40.0)
    assert (ahead.published, behind.published) == (15.0, 13.95)


def test_standard_errors_are_of_counting_or_of_seeds_whichever_is_larger(tmp_path: Path) -> None:
    runs = []
    for row, errors in (("BN", (20.0, 20.2)), ("TENT", (10.0, 30.0))):
        for seed, error in enumerate(errors):
            run = place("N-O-SF", row, "C10-C", seed)
            runs.append((run, made_up(run, error, samples=400)))
    write_results(tmp_path, "protocols", runs)
    steady, unsteady = (row.cells["C10-C"] for row in table_of(tmp_path).rows)
    assert standard_error(steady) == pytest.approx(100 * math.sqrt(0.201 * 0.799 / 400))
    assert standard_error(unsteady) == pytest.approx(statistics.stdev([10.0, 30.0]) / math.sqrt(2))


def test_differences_on_the_same_streams_decide_where_there_are_enough(tmp_path: Path) -> None:
    hard = {"fog": 10.0, "snow": 60.0, "frost": 30.0, "contrast": 80.0, "pixelate": 20.0}
    runs = []
    for row, better in (("BN", 0.0), ("TENT", 0.5)):
        for index, (domain, error) in enumerate(hard.items()):
            run = place("N-O-SF", row, "C10-C", 0, domain)
            runs.append((run, made_up(run, error - better * (1 + 0.1 * index))))
    write_results(tmp_path, "protocols", runs, published=["p"])
    published = {"p": paper(("C10-C",), {("N-O-SF", "BN"): (14.0,), ("N-O-SF", "TENT"): (15.0,)})}
    table = table_of(tmp_path, published)
    bn, tent = (row.cells["C10-C"] for row in table.rows)
    assert paired_differences(bn, tent) == pytest.approx([0.5, 0.55, 0.6, 0.65, 0.7])
    assert bn.mean - tent.mean < standard_error(bn), "counts alone would not tell them apart"
    assert swapped(compare_order(table)) == [("TENT", "BN")]


def test_differences_are_averaged_over_common_seeds_before_domains(tmp_path: Path) -> None:
    errors = {  # by domain and seed
        "BN": {("fog", 0): 10.0, ("fog", 1): 12.0, ("snow", 0): 30.0, ("snow", 1): 31.0},
        "TENT": {("fog", 0): 9.0, ("fog", 1): 8.0, ("snow", 1): 30.5, ("snow", 2): 5.0},
    }
    runs = []
    for row, of in errors.items():
        for (domain, seed), error in of.items():
            run = place("N-O-SF", row, domain, seed, domain)
            runs.append((run, made_up(run, error)))
    write_results(tmp_path, "corruptions", runs)
    bn, tent = (replace(row.cells["fog"], done=sum((c.done for c in row.cells.values()), ()))
                for row in table_of(tmp_path).rows)  # fmt: skip
    assert paired_differences(bn, tent) == pytest.approx([(1.0 + 4.0) / 2, 0.5])


def test_seeds_are_no_domains(tmp_path: Path) -> None:
    runs = []
    for row, better in (("BN", 0.0), ("TENT", 0.5)):
        for seed in range(6):
            run = place("N-O-SF", row, "C10-C", seed)
            runs.append((run, made_up(run, 20.0 - better + 0.001 * seed)))
    write_results(tmp_path, "protocols", runs, published=["p"])
    published = {"p": paper(("C10-C",), {("N-O-SF", "BN"): (14.0,), ("N-O-SF", "TENT"): (15.0,)})}
    found = compare_order(table_of(tmp_path, published))
    assert (found.undecided, found.swaps) == (1, ()), "six orders of the same thousand images tell no half a point"


def test_times_are_in_another_order_by_ratio(tmp_path: Path) -> None:
    seconds = {"BN": 10.0, "TENT": 5.0, "SHOT": 10.5}
    runs = [(run, made_up(run, seconds=seconds[row])) for row in seconds for run in [place("N-O-SF", row, "no queue")]]
    write_results(tmp_path, "time", runs, metric="seconds", published=["p"])
    rows = {("N-O-SF", "BN"): (0.003,), ("N-O-SF", "TENT"): (0.004,), ("N-O-SF", "SHOT"): (0.007,)}
    found = compare_order(table_of(tmp_path, {"p": paper(("no queue",), rows, metric="seconds")}))
    assert (found.same, found.undecided) == (1, 1)
    assert swapped(found) == [("TENT", "BN")]
