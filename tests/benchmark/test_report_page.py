"""The page of a report in a real browser: it renders, sorts, opens records, loads nothing, and fits a phone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_helpers import made_up, place, write_failure, write_results

pytest.importorskip("matplotlib", reason="figures are drawn by matplotlib: pip install 'ttac[report]'")
pytest.importorskip("jinja2", reason="the page is rendered by jinja2: pip install 'ttac[report]'")

from selenium.webdriver.common.keys import Keys

from browser import chromium, colours, contrasts, resize
from ttac.cli import main

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
MINUS = chr(0x2212)
ERRORS = {"BN": 9.5, "TENT": 100.0, "SHOT": 23.25, "TTAC++": 22.0}


def results(root: Path) -> None:
    runs = []
    for row, error in ERRORS.items():
        for seed in (0, 1):
            run = place("N-O-SF", row, "C10-C", seed)
            runs.append((run, made_up(run, error)))
    lone = place("N-O-SL", "TTAC++", "C100-C")
    write_results(root, "protocols", [*runs, (lone, made_up(lone, 41.0))], published=["protocols"], figures=["time"])
    wide = [place("N-O-SF", "BN", f"column_{index}", 0, HOSTILE) for index in range(16)]
    for index, run in enumerate(wide):
        run["name"] = f"wide {index}"
    bad = place("N-O-SF", HOSTILE, "column_0", name="bad")
    failed = place("N-O-SF", "TENT", "column_0", name="failed")
    folder = write_results(
        root, "wide", [*((run, made_up(run)) for run in wide), (bad, made_up(bad)), (failed, None)],
        title=f"Wide {HOSTILE}", about=HOSTILE, command=HOSTILE, average=True, figures=["bars"],
    )  # fmt: skip
    write_failure(folder, failed, HOSTILE)
    exact = place("N-O-SF", "BN", "C10-C")
    write_results(root, "protocols", [(exact, made_up(exact, 15.0))], "paper", published=["protocols"])
    timed = place("N-O-SF", "BN", "no queue")
    write_results(root, "time", [(timed, made_up(timed, seconds=4.0))], metric="seconds", published=["time"])
    classed = place("N-O-SF", "BN", "VisDA-C", domain=None)
    record = made_up(classed, 33.0, class_error=[12.0, 48.0])
    write_results(root, "visda", [(classed, record)], by_class=True, classes=["bus", "car"], average=True)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("browser")) as driver:
        yield driver


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("page")
    results(root / "results")
    assert main(["report", str(root / "results"), "--out", str(root / "report")]) == 0
    return (root / "report" / "index.html").as_uri()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """The page on a desktop in light colours; whatever a test does, the console must stay empty."""
    resize(browser, 1280)
    colours(browser, "light")
    browser.get_log("browser")  # of the page before
    browser.get(address)
    yield browser
    assert browser.get_log("browser") == []


def column(page: Any, index: int) -> list[str]:
    """Read a column of the first protocol of the first table as it is shown."""
    return list(
        page.execute_script(
            "const rows = [...document.querySelector('#protocols-tiny tbody').rows].slice(1);"
            "return rows.map(row => (row.cells[arguments[0]].querySelector('.num') ?? row.cells[arguments[0]])"
            ".firstChild.textContent.trim())",
            index,
        )
    )


def heading(page: Any, index: int) -> Any:
    return page.find_elements("css selector", "#protocols-tiny thead button")[index]


def test_the_page_shows_tables_figures_and_the_paper(page: Any) -> None:
    assert page.title
    assert column(page, 0) == list(ERRORS)
    assert column(page, 1) == ["9.50", "100.00", "23.25", "22.00"]
    bold = page.find_elements("css selector", "#protocols-tiny .best .num")
    assert [int(page.execute_script("return getComputedStyle(arguments[0]).fontWeight", each)) for each in bold] == [
        700
    ]
    assert bold[0].text.startswith("9.50")
    beside = page.find_element("css selector", "#protocols-tiny .paper").text
    assert beside.split() == ["paper", "15.49"], "no difference between values that do not compare"
    exact = page.find_element("css selector", "#protocols-paper .paper").text
    assert exact.split() == ["paper", f"15.49{MINUS}0.49"]
    for svg in page.find_elements("css selector", "figure svg"):
        assert svg.size["width"] > 300
        assert svg.size["height"] > 150
    assert len(page.find_elements("css selector", "figure svg")) == 2
    ids = page.execute_script("return [...document.querySelectorAll('[id]')].map(each => each.id)")
    assert len(ids) == len(set(ids))


def test_headings_sort_numbers_both_ways(page: Any) -> None:
    head = heading(page, 1)
    sort_of = "return arguments[0].closest('th').getAttribute('aria-sort')"
    assert page.execute_script(sort_of, head) == "none"
    head.click()
    assert column(page, 1) == ["9.50", "22.00", "23.25", "100.00"], "as numbers, not as texts"
    assert column(page, 0) == ["BN", "TTAC++", "SHOT", "TENT"], "rows move as a whole"
    assert page.execute_script(sort_of, head) == "ascending"
    head.click()
    assert column(page, 1) == ["100.00", "23.25", "22.00", "9.50"]
    assert page.execute_script(sort_of, head) == "descending"
    heading(page, 0).send_keys(Keys.ENTER)
    assert column(page, 0) == sorted(ERRORS, key=str.lower), "by keyboard, too"
    assert page.execute_script(sort_of, head) == "none"
    groups = page.execute_script(
        "return [...document.querySelectorAll('#protocols-tiny .group')].map(e => e.innerText)"
    )
    assert [text.split()[0] for text in groups] == ["N-O-SF", "N-O-SL"], "protocols stay apart"


def test_a_number_opens_its_records(page: Any, address: str) -> None:
    button = page.find_elements("css selector", "#protocols-tiny .num")[2]
    button.click()
    dialog = page.find_element("css selector", "dialog")
    assert dialog.is_displayed()
    assert "SHOT, N-O-SF, C10-C: 23.25" in dialog.text
    assert "n = 2 seeds, 2 records; in the paper 13.95" in dialog.text
    records = dialog.find_elements("css selector", "details")
    assert len(records) == 2
    records[0].find_element("css selector", "summary").click()
    said = records[0].text
    words = ("23.25 %", "n = 1,000", "fog", "seed 0", "8.0", "made-up.yaml", "0123456789abcdef", "torch 2.13.0")
    for word in (*words, "feedbeef"):
        assert word in said
    href = records[0].find_element("css selector", "a").get_attribute("href")
    file = Path(href.removeprefix("file://"))
    assert json.loads(file.read_text())["error"] == 23.25
    dialog.send_keys(Keys.ESCAPE)
    assert not dialog.is_displayed()
    assert page.switch_to.active_element == button


def test_cells_without_a_number_are_last_both_ways(page: Any) -> None:
    page.execute_script(
        "const [first] = document.querySelector('#protocols-tiny tbody').querySelectorAll('td');"
        "first.removeAttribute('data-value'); first.textContent = '';"
    )
    for order in (["TTAC++", "SHOT", "TENT", "BN"], ["TENT", "SHOT", "TTAC++", "BN"]):
        heading(page, 1).click()
        assert column(page, 0) == order


@pytest.mark.parametrize(
    ("section", "index", "title", "said"),
    [
        ("time-tiny", 0, "BN, N-O-SF, no queue: 0.0040", "0.0040 s a sample on C10-C"),
        ("visda-tiny", 1, "BN, N-O-SF, bus: 12.00", "12.00 % on C10-C"),
        ("visda-tiny", 0, "BN, N-O-SF, mean: 30.00", "30.00 % on C10-C"),
    ],
)
def test_a_record_is_told_with_the_number_that_opened_it(
    page: Any, section: str, index: int, title: str, said: str
) -> None:
    page.find_elements("css selector", f"#{section} .num")[index].click()
    dialog = page.find_element("css selector", "dialog")
    assert dialog.find_element("css selector", "h2").text == title
    assert dialog.find_element("css selector", "summary").text.startswith(said)
    assert "n = 1 seed, 1 record" in dialog.text
    assert "1 records" not in dialog.text


def test_nothing_is_loaded(page: Any) -> None:
    loaded = page.execute_script("return performance.getEntriesByType('resource').map(each => each.name)")
    assert [name for name in loaded if not name.startswith("data:")] == []


def test_texts_of_records_stay_texts(page: Any) -> None:
    wide = page.find_element("id", "wide-tiny")
    assert HOSTILE in wide.text
    wide.find_elements("css selector", ".num")[0].click()
    assert HOSTILE in page.find_element("css selector", "dialog").text
    assert page.execute_script("return window.hacked") is None
    assert not page.find_elements("css selector", "img")


def test_what_failed_and_what_is_partial_is_told(page: Any) -> None:
    wide = page.find_element("id", "wide-tiny")
    assert "17 of 18 runs, 1 failed" in wide.text
    marks = wide.find_elements("css selector", "sup")
    assert [mark.get_attribute("title") for mark in marks] == ["1 of 16 columns"]


def test_the_mean_stands_beside_the_methods(page: Any) -> None:
    heads = page.find_elements("css selector", "#wide-tiny thead th")
    assert [head.text.split()[0] for head in heads[:3]] == ["method", "mean", "column_0"]
    cells = page.find_elements("css selector", "#wide-tiny tbody tr:nth-child(2) td")
    assert [cell.get_attribute("class").strip() for cell in cells[:2]] == ["mean", ""]


def test_a_phone_shows_it_without_scrolling_sideways(page: Any) -> None:
    resize(page, 390)
    assert page.execute_script("return document.documentElement.scrollWidth") <= 390
    sizes = page.execute_script(
        "return [...document.querySelectorAll('p, td, th, summary, .paper, .num small, dd')]"
        ".filter(e => e.innerText && e.offsetParent).map(e => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 12
    assert page.execute_script("return parseFloat(getComputedStyle(document.querySelector('td')).fontSize)") >= 14
    box = page.find_element("css selector", "#wide-tiny .scroll")
    assert page.execute_script("return arguments[0].scrollWidth > arguments[0].clientWidth", box)
    drawn = page.execute_script(
        "return [...document.querySelectorAll('figure svg text')]"
        ".map(e => parseFloat(getComputedStyle(e).fontSize) * Math.hypot(e.getScreenCTM().a, e.getScreenCTM().b))"
    )
    assert min(drawn) >= 9, "words in figures can be read"
    boxes = page.find_elements("css selector", ".draw")
    assert all(box.get_attribute("tabindex") == "0" for box in boxes), "they scroll by keyboard"
    page.find_element("css selector", ".num").click()
    assert page.find_element("css selector", "dialog").size["width"] <= 390
    assert page.execute_script("return document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_words_stand_out_in_light_and_dark(page: Any, scheme: str) -> None:
    colours(page, scheme)
    back = page.execute_script("return getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
    assert (int(back) < 60) == (scheme == "dark")
    words = "h1, h2, p, dt, dd, a, th, td, .num, .num small, .paper, .chip, summary, figcaption, figure svg text"
    found = contrasts(page, words)
    assert len(found) > 100
    assert [pair for pair in found if pair[0] < 4.5] == []
