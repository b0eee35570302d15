"""`ttac report` writes its files, and no others; figures are whole pictures of the records."""

from __future__ import annotations

import html
import importlib.util
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image
from report_helpers import made_up, place, write_results

pytest.importorskip("matplotlib", reason="figures are drawn by matplotlib: pip install 'ttac[report]'")
pytest.importorskip("jinja2", reason="the page is rendered by jinja2: pip install 'ttac[report]'")

from ttac.benchmark.report import job
from ttac.benchmark.report.figures import _curve, colours, cumulative_error, draw
from ttac.benchmark.report.page import inline_svg
from ttac.benchmark.report.results import load_results
from ttac.benchmark.report.tables import make_table
from ttac.benchmark.report.writers import OTHER_SCALES
from ttac.cli import main

SVG = "{http://www.w3.org/2000/svg}"


def all_kinds(root: Path) -> None:
    """Write one experiment that has every figure."""
    runs = []
    for group, row, error in (("-", "TEST", 50.0), ("N-O-SL", "TTAC", 30.0), ("N-O-SL", "TTAC++ $x_1$ <b>", 20.0)):
        for column in ("tau 0.5", "tau 0.9"):
            run = place(group, row, column)
            runs.append((run, made_up(run, error)))
    folder = write_results(root, "all", runs, figures=["cumulative", "bars", "heatmap", "time", "tsne"])
    points = {
        "format": "ttac.points/1",
        "points": [[0, 0], [1, 1], [2, 0]],
        "labels": [0, 1, 1],
    }
    for run, _ in runs[::2]:
        (folder / f"{run['name']}.tsne.json").write_text(json.dumps(points))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of made-up results, beside them."""
    root = tmp_path_factory.mktemp("report")
    all_kinds(root / "results")
    assert main(["report", str(root / "results"), "--out", str(root / "out")]) == 0
    return root / "out"


def files_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_all_files_are_there(report: Path) -> None:
    kinds = ("cumulative", "bars", "heatmap", "time", "tsne")
    expected = {"index.html", "README.md"}
    expected |= {f"tables/all-tiny.{suffix}" for suffix in ("md", "csv", "tex")}
    expected |= {f"figures/all-tiny-{kind}.{suffix}" for kind in kinds for suffix in ("png", "svg")}
    assert files_below(report) == expected


@pytest.mark.parametrize("kind", ["cumulative", "bars", "heatmap", "time", "tsne"])
def test_figures_show_something_and_name_it(report: Path, kind: str) -> None:
    with Image.open(report / "figures" / f"all-tiny-{kind}.png") as picture:
        assert 500 <= picture.width <= 1400
        assert len(picture.convert("RGB").getcolors(1 << 20) or []) > 10
    root = ElementTree.parse(report / "figures" / f"all-tiny-{kind}.svg").getroot()
    texts = {"".join(text.itertext()).strip() for text in root.iter(f"{SVG}text")}
    assert any("TTAC++ $x_1$ <b>" in text for text in texts), "a name is no formula"
    wanted = {
        "cumulative": {"N-O-SL, tau 0.5", "TEST", "TEST 51.0"},
        "bars": {"error (%)", "N-O-SL", "tau 0.9"},
        "heatmap": {"50.00", "20.00", "tau", "0.5"},
        "time": {"seconds a sample (log scale)", "TEST 50.0", "TTAC"},
        "tsne": {"50.00 % error", "20.00 % error"},
    }
    assert wanted[kind] <= texts


def test_the_overview_shows_every_table_and_figure(report: Path) -> None:
    text = (report / "README.md").read_text()
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert (report / target).is_file()
    assert len(re.findall(r"!\[", text)) == 5
    assert "| N-O-SL | TTAC | 30.00 |" in text


def test_several_tables_of_an_experiment_share_their_records(tmp_path: Path) -> None:
    runs = []
    for group, row, error in (("N-O-SF", "BN", 20.0), ("N-O-SL", "TTAC", 18.5)):
        run = place(group, row, "C10-C")
        runs.append((run, made_up(run, error, latency_ms={"update": {"count": 2, "mean": 3 * error}})))
    names = [run["name"] for run, _ in runs]
    tables = {
        "errors": {"title": "error", "runs": names},
        "harm": {"title": "harm", "against": "bn", "runs": names},
        "cost": {"title": "cost", "metric": "update", "runs": names},
        "rest": {"title": "nothing yet", "runs": []},
    }
    write_results(tmp_path / "results", "development", runs, tables=tables)
    out = tmp_path / "out"
    assert main(["report", str(tmp_path / "results"), "--out", str(out)]) == 0
    files = {f"tables/development-tiny-{name}.{suffix}" for name in tables for suffix in ("md", "csv", "tex")}
    assert files_below(out) == files | {"index.html", "README.md"}
    errors, harm, cost = ((out / f"tables/development-tiny-{name}.md").read_text() for name in list(tables)[:3])
    assert "| N-O-SL | TTAC | 18.50 |" in errors
    assert "| N-O-SL | TTAC | -1.50 |" in harm
    assert "Points of error above BN, mean; lower is better" in harm
    assert "| N-O-SL | TTAC | 0.0555 |" in cost
    page = html.unescape((out / "index.html").read_text())
    assert "2 of 2, over 4 tables" in page
    assert "0.0555 s an update" in page


def test_a_second_report_replaces_its_files_and_keeps_others(tmp_path: Path) -> None:
    run = place("N-O-SF", "BN", "C10-C")
    write_results(tmp_path / "results", "protocols", [(run, made_up(run, 12.5))])
    out = tmp_path / "out"
    (out / "tables").mkdir(parents=True)
    for mine in ("notes.txt", "tables/mine.csv"):
        (out / mine).write_text("mine")
    for _ in range(2):
        assert main(["report", str(tmp_path / "results"), "--out", str(out)]) == 0
    assert "12.50" in (out / "tables" / "protocols-tiny.md").read_text()
    assert (out / "notes.txt").read_text() == (out / "tables" / "mine.csv").read_text() == "mine"


@pytest.mark.parametrize("name", ["README.md", "index.html"])
def test_a_file_of_something_else_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    run = place("N-O-SF", "BN", "C10-C")
    write_results(tmp_path, "protocols", [(run, made_up(run))])
    (tmp_path / name).write_text("by hand")
    assert main(["report", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert f"{name} is of something else: choose another --out" in capsys.readouterr().err
    assert (tmp_path / name).read_text() == "by hand"
    assert not (tmp_path / "tables").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["results"], "run ttac bench first"),
        (["nowhere"], "is not a folder"),
        (["protocols", "--experiment", "visda"], "no results of visda"),
    ],
)
def test_mistakes_end_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    (tmp_path / "results").mkdir()
    run = place("N-O-SF", "BN", "C10-C")
    write_results(tmp_path, "protocols", [(run, made_up(run))])
    folder, *more = arguments
    assert main(["report", str(tmp_path / folder), "--out", str(tmp_path / "out"), *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_missing_packages_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "jinja2" else find(name, *more)
    )
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "reports are made with jinja2: pip install 'ttac[report]'" in capsys.readouterr().err


def test_curves_are_averaged_where_all_have_samples() -> None:
    records: list[Any] = [
        made_up({}, cumulative_error=[(100, 50.0), (200, 40.0), (300, 30.0)]),
        made_up({}, cumulative_error=[(100, 30.0), (200, 10.0)]),
    ]
    assert _curve(records) == ([100.0, 200.0], [40.0, 25.0])


def test_what_is_not_adapted_is_drawn_beside_methods_of_the_same_source(tmp_path: Path) -> None:
    runs = []
    for group, row, source in (("-", "TEST", "plain"), ("N-O-SF", "BN", "plain"), ("Y-O-SL", "TTAC", "contrastive")):
        run = place(group, row, "C10-C", source=source)
        runs.append((run, made_up(run)))
    write_results(tmp_path, "protocols", runs)
    (experiment,), _ = load_results(tmp_path)
    figure = cumulative_error(make_table(experiment, {}))
    assert figure is not None
    lines = {axes.get_title(): len(axes.lines) for axes in figure.axes}
    assert lines == {"N-O-SF": 2, "Y-O-SL": 1}


def test_figures_leave_means_over_a_part_of_the_domains_out(tmp_path: Path) -> None:
    runs = []
    for row, domains in (("BN", 5), ("TENT", 4)):
        for index in range(5):  # too many for panels of their own
            run = place("N-O-SF", row, "C10-C", 0, f"domain {index}")
            runs.append((run, made_up(run) if index < domains else None))
    write_results(tmp_path, "protocols", runs)
    (experiment,), _ = load_results(tmp_path)
    table = make_table(experiment, {})
    assert [row.title for row in table.rows] == ["BN", "TENT"]
    curves, bars, times = (draw(kind, table) for kind in ("cumulative", "bars", "time"))
    assert [len(axes.lines) for axes in curves.axes] == [1]
    assert [len(axes.patches) for axes in bars.axes] == [1]
    assert [text.get_text() for text in times.axes[0].texts] == ["BN"]


def test_what_is_not_adapted_does_not_set_the_limits(tmp_path: Path) -> None:
    runs = []
    for group, row, error in (
        ("-", "TEST", 40.0),
        ("N-O-SF", "BN", 21.0),
        ("N-O-SF", "TENT", 20.0),
        ("N-M-SF", "BN", 39.5),
    ):
        run = place(group, row, "C10-C")
        runs.append((run, made_up(run, error, cumulative_error=[(500, error), (1000, error)])))
    write_results(tmp_path, "protocols", runs)
    (experiment,), _ = load_results(tmp_path)
    for kind in ("cumulative", "time"):
        far, near = draw(kind, make_table(experiment, {})).axes
        assert (far.get_title(), near.get_title()) == ("N-O-SF", "N-M-SF")
        assert far.get_ylim() == (19.0, 22.0)
        assert near.get_ylim() == (38.5, 40.5)
        assert "TEST 40.0" in [text.get_text() for text in far.texts]
        assert "TEST 40.0" not in [text.get_text() for text in near.texts]


def test_points_of_a_table_of_times_are_joined_from_the_fastest(tmp_path: Path) -> None:
    runs = []
    for column, seconds in (("slow", 9.0), ("fast", 1.0), ("middle", 4.0)):
        run = place("N-O-SL", "TTAC", column)
        runs.append((run, made_up(run, 20.0, seconds=seconds)))
    write_results(tmp_path, "time", runs, metric="seconds")
    (experiment,), _ = load_results(tmp_path)
    (axes,) = draw("time", make_table(experiment, {})).axes
    assert axes.lines[0].get_xdata().tolist() == pytest.approx([0.001, 0.004, 0.009])


def test_there_are_no_empty_figures(tmp_path: Path) -> None:
    runs = [place("N-O-SF", "BN", "C10-C", 0, f"domain {index}") for index in range(5)]
    write_results(tmp_path, "protocols", [(run, None if index else made_up(run)) for index, run in enumerate(runs)])
    (experiment,), _ = load_results(tmp_path)
    table = make_table(experiment, {})
    assert table.rows
    assert [draw(kind, table) for kind in ("cumulative", "bars", "heatmap", "time", "tsne")] == [None] * 5


def test_nothing_is_written_where_something_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise ValueError("no page")

    run = place("N-O-SF", "BN", "C10-C")
    write_results(tmp_path / "results", "protocols", [(run, made_up(run))], figures=["bars"])
    monkeypatch.setattr(job, "render_page", fail)
    assert main(["report", str(tmp_path / "results"), "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def test_a_commit_that_is_no_text_is_shown_as_it_is(tmp_path: Path) -> None:
    run = place("N-O-SF", "BN", "C10-C")
    record = made_up(run)
    record.provenance["commit"] = [12345]
    write_results(tmp_path / "results", "protocols", [(run, record)])
    assert main(["report", str(tmp_path / "results"), "--out", str(tmp_path / "out")]) == 0
    assert "[12345]" in (tmp_path / "out" / "index.html").read_text()


def test_the_overview_and_the_page_say_that_values_do_not_compare(tmp_path: Path, report: Path) -> None:
    run = place("N-O-SF", "BN", "C10-C")
    write_results(tmp_path / "results", "protocols", [(run, made_up(run))], published=["protocols"])
    assert main(["report", str(tmp_path / "results"), "--out", str(tmp_path / "out")]) == 0
    for name in ("README.md", "index.html"):
        text = html.unescape((tmp_path / "out" / name).read_text())
        assert text.count(OTHER_SCALES) == 2, "at the beginning and in the legend"
        assert OTHER_SCALES not in html.unescape((report / name).read_text()), "where nothing is compared"


def test_names_have_different_colours() -> None:
    methods = ["TEST", "BN", "TENT", "T3A", "SHOT", "Conjugate PL", "Self-Training", "AdaContrast", "TTT-R", "TTT++",
               "TTAC", "TTAC+SHOT", "TTAC++"]  # fmt: skip
    assert len(set(colours(methods).values())) == len(methods)
    assert len(set(colours(["TTAC", "a", "b", "c"]).values())) == 4


def test_figures_of_a_page_share_no_ids(report: Path) -> None:
    text = (report / "figures" / "all-tiny-bars.svg").read_text()
    one, two = (inline_svg(text, prefix, "bars") for prefix in ("a-", "b-"))
    ids = [set(re.findall(r'\bid="([^"]+)"', svg)) for svg in (one, two)]
    assert ids[0]
    assert not ids[0] & ids[1]
    used = set(re.findall(r'href="#([^"]+)"', one)) | set(re.findall(r"url\(#([^)]+)\)", one))
    assert used <= ids[0]
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", one)
