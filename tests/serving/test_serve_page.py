"""The page of a server in a real browser: it draws what is served, sends what is asked, and tells what fails."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.common.keys import Keys
from serve_page_helpers import (
    GAP,
    HOSTILE,
    NAMES,
    SECONDS,
    Stub,
    attributes,
    element,
    eventually,
    facts,
    made_up_events,
    made_up_history,
    made_up_status,
    open_page,
    stub_server,
    texts,
)

from browser import chromium, colours, contrasts, resize

UNKNOWN = chr(0x2013)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("browser")) as driver:
        yield driver


@pytest.fixture
def stub() -> Iterator[Stub]:
    with stub_server() as server:
        yield server


@pytest.fixture
def page(browser: Any, stub: Stub) -> Iterator[Any]:
    """A desktop in light colours, with nothing opened yet; whatever a test does, nothing of the page goes wrong."""
    resize(browser, 1400)
    colours(browser, "light")
    browser.get("about:blank")
    browser.get_log("browser")  # of the page before
    yield browser
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(each => each.name)")
    assert [name for name in loaded if not name.startswith(("data:", stub.address))] == [], "no other host"
    assert browser.execute_script("return window.hacked") is None
    assert not browser.find_elements("css selector", "img")
    entries = browser.get_log("browser")
    browser.get("about:blank")
    assert [each for each in entries if not (stub.troubled and each["source"] == "network")] == []


def test_the_numbers_shown_are_those_served(page: Any, stub: Stub) -> None:
    open_page(page, stub)
    assert texts(page, "#name, #state, #about b") == [
        "resnet-20",
        "Adapting",
        "ttac++",
        "12",
        "34 s ago",
        "2 h 3 min",
        "cpu",
    ]
    assert texts(page, "#now-rate b, #now-latency b") == ["80 /s", "1.50 ms", "5.80 ms"]
    assert texts(page, "#now-confidence b, #now-distance b") == ["79.8 %", "1.91"]
    adapter = facts(page, "adapter")
    assert adapter.pop("last snapshot").startswith("1 min 3")
    assert list(adapter.values()) == ["40,960", "64", "128", "2,048", "160", "1.9 s", "v11", "1", "0.40 s ago"]
    predictor = ["cpu", "48,213", "51,234", "17", "3", "1.84 ms, 4.27 ms", "34 s"]
    assert list(facts(page, "predictor").values()) == predictor
    rows = [row.split() for row in element(page, "guard").text.splitlines()[1:]]
    assert rows == [
        ["entropy", "0.310", "0.620", "≥", "0.125", "ok"],
        ["agreement", "0.840", UNKNOWN, "≥", "0.500", "ok"],
        ["distance", "1.42", "2.75", "≤", "4.60", "ok"],
    ]
    assert facts(page, "losses") == {"alignment": "0.457", HOSTILE: "-1.25"}
    assert element(page, "losses").is_displayed()
    stub.set(adapter={"losses": {}})
    eventually(lambda: not element(page, "losses").is_displayed())


def test_charts_have_a_mark_for_every_value(page: Any, stub: Stub) -> None:
    open_page(page, stub)
    lines = attributes(page, "#latency .line", "d")
    assert [line.count("M") for line in lines] == [2, 2], "seconds without a value are a gap"
    assert [line.count("L") for line in lines] == [SECONDS - len(GAP) - 2] * 2
    assert attributes(page, "#classes .share", "data-name") == NAMES
    shares = [float(text.removesuffix(" %")) for text in texts(page, "#classes-legend b")]
    assert shares == [round(100 * (index + 1) / 55, 1) for index in range(10)]
    assert len(page.find_elements("css selector", "#latency .update")) == 2
    assert len(page.find_elements("css selector", "#confidence .alarm")) == 2, "the guard and the rollback"
    marks = attributes(page, "#timeline .mark", "data-event")
    assert marks == ["publish", "guard", "rollback", "publish", "snapshot", "restart", "publish"], "not the old start"
    assert texts(page, "#list .kind") == [*marks[::-1], "start"]
    page.find_element("css selector", "[data-seconds='60']").click()
    assert attributes(page, "#timeline .mark", "data-event") == ["restart", "publish"]
    element(page, "brief").click()
    assert texts(page, "#list .kind") == ["restart", "rollback", "guard", "start"]


def test_a_line_stands_where_the_axis_says(page: Any, stub: Stub) -> None:
    open_page(page, stub)
    heights = page.execute_script(
        "return Object.fromEntries([...document.querySelectorAll('#confidence text')]"
        ".map(each => [each.textContent, Number(each.getAttribute('y')) - 4]))"
    )
    (line,) = attributes(page, "#confidence .line", "d")
    first, last = (float(place.split()[1]) for place in (line[1:].split("L")[0], line.split("L")[-1]))
    height = heights["0 %"] - heights["100 %"]
    for y, value in ((first, 0.5), (last, 0.5 + (SECONDS - 1) / 400)):
        assert (heights["0 %"] - y) / height == pytest.approx(value, abs=0.005)


def test_bars_are_as_long_as_the_distances(page: Any, stub: Stub) -> None:
    open_page(page, stub)
    assert texts(page, "#bars .who") == NAMES
    measured = "return [...document.querySelectorAll('#bars i')].map(each => each.getBoundingClientRect().width)"
    widths = page.execute_script(measured)
    served = made_up_status(0)["distances"]
    pairs = zip(served["adapted"], served["source"], strict=True)
    wanted = [value or 0 for pair in pairs for value in pair]
    assert [width / widths[1] for width in widths] == pytest.approx([value / 2.0 for value in wanted], abs=0.02)
    assert texts(page, "#bars .value")[-1] == f"{UNKNOWN} / 3.80"


def test_of_a_thousand_classes_the_farthest_are_shown(page: Any, stub: Stub) -> None:
    adapted = [float((index * 37) % 1000) for index in range(1000)]
    adapted[5] = None  # type: ignore[call-overload]
    names = [f"class number {index}" for index in range(1000)]
    stub.set(classes=names, distances={"adapted": adapted, "source": [1.0] * 1000})
    shown = [*names[:12], "others"]
    stub.content["/history"] = lambda: made_up_history(time.time(), shown)
    open_page(page, stub)
    wanted = sorted((value, name) for value, name in zip(adapted, names, strict=True) if value is not None)[:-21:-1]
    assert texts(page, "#bars .who") == [name for _, name in wanted]
    assert texts(page, "#bars-note") == ["the 20 farthest of 1,000 classes"]
    assert attributes(page, "#classes .share", "data-name") == shown
    assert len(set(attributes(page, "#classes .share", "style"))) == 13, "each has its colour"


def test_nothing_one_point_and_unknown_values_are_drawn(page: Any, stub: Stub) -> None:
    def cut(count: int) -> dict[str, Any]:
        history = made_up_history(time.time())
        part = {name: values[:count] if isinstance(values, list) else values for name, values in history.items()}
        part["classes"] = {"names": NAMES, "counts": history["classes"]["counts"][:count]}
        return part

    stub.content["/history"] = lambda: cut(0)
    stub.content["/events"] = lambda: {"events": []}
    stub.set(guard=None, distances={}, predictor={"p50_ms": None, "device": None}, adapter={"snapshot": None})
    open_page(page, stub)
    for chart in ("rate", "latency", "confidence", "classes", "distance", "timeline"):
        assert any(text.startswith(("No", "Not")) for text in texts(page, f"#{chart} text")), chart
    assert facts(page, "adapter")["last snapshot"] == "none"
    stub.content["/history"] = lambda: cut(1)
    eventually(lambda: len(page.find_elements("css selector", "#latency .dot")) == 2)
    assert len(page.find_elements("css selector", "#classes .share")) == len(NAMES)


def test_values_are_told_under_the_pointer_and_by_keyboard(page: Any, stub: Stub) -> None:
    still = {"/history": made_up_history(time.time()), "/events": {"events": made_up_events(time.time())}}
    stub.content |= {path: lambda content=content: content for path, content in still.items()}
    open_page(page, stub)
    chart = page.find_element("css selector", "#latency svg")
    ActionChains(page).move_to_element_with_offset(chart, chart.size["width"] // 2 - 2, 0).perform()
    tip = element(page, "tip")
    assert tip.text.split()[1:] == ["p50", "1.50", "ms", "p99", "5.80", "ms"], "the newest"
    ActionChains(page).move_to_element(element(page, "name")).perform()
    assert not tip.is_displayed()
    chart.send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert tip.text.split()[1:3] == ["p50", "2.10"], "one before"
    page.find_element("css selector", "#timeline svg").send_keys(Keys.ARROW_LEFT)
    assert "version 12" in tip.text
    page.find_element("css selector", "#classes svg").send_keys(Keys.ARROW_LEFT)
    assert f"{HOSTILE}" in tip.text


def test_buttons_send_what_they_say_with_the_token_of_the_address(page: Any, stub: Stub) -> None:
    stub.token = stub.read_token = "s3cret+/="
    open_page(page, stub, "#token=s3cret%2B/=")
    assert page.current_url == stub.address, "the token does not stay in the address"
    element(page, "pause").click()
    eventually(lambda: texts(page, "#outcome span")[0].endswith(f"done {HOSTILE}"))
    stub.set(adapter={"state": "paused"})
    eventually(lambda: texts(page, "#state, #pause") == ["Paused", "Resume"])
    page.refresh()
    eventually(lambda: texts(page, "#pause") == ["Resume"])
    element(page, "pause").send_keys(Keys.ENTER)
    element(page, "snapshot").click()
    eventually(lambda: len(stub.posted) == 3)
    bearer = "Bearer s3cret+/="
    assert sorted(stub.posted[1:]) == [("/admin/resume", bearer, {}), ("/admin/snapshot", bearer, {})]
    assert stub.posted[0] == ("/admin/pause", bearer, {})
    assert set(stub.seen) == {bearer}


def test_a_reset_is_asked_about_first(page: Any, stub: Stub) -> None:
    open_page(page, stub)
    button, dialog = element(page, "reset"), element(page, "ask")
    for leave in (lambda: element(page, "ask-cancel").click(), lambda: dialog.send_keys(Keys.ESCAPE)):
        button.click()
        assert dialog.is_displayed()
        assert not element(page, "ask-version").is_displayed()
        leave()
        assert not dialog.is_displayed()
        assert page.switch_to.active_element == button
    assert stub.posted == []
    button.click()
    element(page, "ask-go").click()
    eventually(lambda: stub.posted == [("/admin/reset", None, {})])


def test_a_rollback_goes_to_the_version_before_or_to_another(page: Any, stub: Stub) -> None:
    open_page(page, stub)
    element(page, "rollback").click()
    version = element(page, "ask-version")
    assert version.get_attribute("placeholder") == "the one before"
    version.send_keys(Keys.ENTER)
    eventually(lambda: stub.posted == [("/admin/rollback", None, {})])
    element(page, "rollback").click()
    version.send_keys("7", Keys.ENTER)
    eventually(lambda: stub.posted[1:] == [("/admin/rollback", None, {"version": 7})])


def test_a_server_that_wants_a_token_is_not_said_to_be_ill(page: Any, stub: Stub) -> None:
    stub.read_token, stub.troubled = "s3cret", True
    page.get(stub.address)
    eventually(lambda: element(page, "token").is_displayed())
    eventually(lambda: texts(page, "#state") == ["Token needed"])
    assert not element(page, "adapter-away").is_displayed()
    element(page, "token-field").send_keys("wrong", Keys.ENTER)
    eventually(lambda: element(page, "token").is_displayed())
    element(page, "token-field").send_keys("s3cret", Keys.ENTER)
    eventually(lambda: texts(page, "#state") == ["Adapting"])
    tokens = page.execute_script("return Object.values(sessionStorage).filter(each => each === 's3cret').length")
    assert tokens == 2, "the wrong one is kept for nothing"


def test_a_call_that_is_refused_asks_for_the_token_and_is_made_again(page: Any, stub: Stub) -> None:
    stub.token, stub.troubled = "s3cret", True
    open_page(page, stub)
    assert not element(page, "token").is_displayed()
    element(page, "snapshot").click()
    eventually(lambda: element(page, "token").is_displayed())
    assert texts(page, "#token-why") == [f"This needs the server's token: wrong token {HOSTILE}"]
    element(page, "token-field").send_keys("s3cret", Keys.ENTER)
    eventually(lambda: len(stub.posted) == 2)
    assert [token for _, token, _ in stub.posted] == [None, "Bearer s3cret"]
    eventually(lambda: element(page, "outcome").is_displayed())
    assert not element(page, "token").is_displayed()
    eventually(lambda: stub.seen[-1] == "Bearer s3cret")


def test_reading_asks_for_a_token_where_one_is_needed(page: Any, stub: Stub) -> None:
    stub.read_token, stub.troubled = "other", True
    page.get(stub.address)
    eventually(lambda: element(page, "token").is_displayed())
    element(page, "token-field").send_keys("other", Keys.ENTER)
    eventually(lambda: texts(page, "#name") == ["resnet-20"])
    assert not element(page, "token").is_displayed()


def test_what_a_call_could_not_do_is_told(page: Any, stub: Stub) -> None:
    stub.reply, stub.troubled = (409, {"error": "version 99 is not kept"}), True
    open_page(page, stub)
    element(page, "snapshot").click()
    eventually(lambda: texts(page, "#outcome span")[0].endswith("snapshot: version 99 is not kept"))
    assert element(page, "outcome").get_attribute("data-tone") == "bad"
    page.find_element("css selector", "#outcome button").click()
    assert not element(page, "outcome").is_displayed()


def test_a_server_that_goes_away_is_told_and_found_again(browser: Any) -> None:
    resize(browser, 1400)
    with stub_server() as stub:
        open_page(browser, stub)
    eventually(lambda: element(browser, "away").is_displayed())
    assert element(browser, "away").text.startswith("Not reachable since ")
    assert texts(browser, "#state") == ["Not reachable"]
    element(browser, "snapshot").click()
    eventually(lambda: texts(browser, "#outcome span")[0].endswith("the server is not reachable"))
    with stub_server(int(stub.address.split(":")[2].strip("/"))) as again:
        eventually(lambda: not element(browser, "away").is_displayed())
        assert texts(browser, "#state") == ["Adapting"]
        again.fail = 503
        eventually(lambda: "(too busy)" in element(browser, "away").text)
        again.fail = None
        eventually(lambda: not element(browser, "away").is_displayed())
        browser.get("about:blank")
    assert {each["source"] for each in browser.get_log("browser")} == {"network"}


def test_an_adapter_that_is_away_and_a_guard_that_trips_are_told(page: Any, stub: Stub) -> None:
    stub.set(adapter={"up": False, "seconds_since_heard": 42.0, "restarts": 3})
    open_page(page, stub)
    assert texts(page, "#state") == ["Adapter away 42 s"]
    said = element(page, "adapter-away").text
    assert "not been heard for 42 s (restarts so far: 3)" in said
    assert "version 12, whose weights are 34 s old" in said
    measures = made_up_status(0)["guard"]["measures"] | {"entropy": {"adapted": 0.01, "source": 0.62, "limit": 0.125}}
    stub.set(adapter={"state": "guarded"}, guard={"ok": False, "reasons": [HOSTILE], "measures": measures})
    eventually(lambda: texts(page, "#state") == ["Guarded"])
    assert not element(page, "adapter-away").is_displayed()
    assert texts(page, "#guarded li") == [HOSTILE]
    assert texts(page, "#guard tr[data-tone] > *") == ["entropy", "0.0100", "0.620", "≥ 0.125", "too low"]


def test_a_hidden_tab_asks_for_nothing(page: Any, stub: Stub) -> None:
    open_page(page, stub)
    hide = "Object.defineProperty(document, 'hidden', {value: arguments[0], configurable: true});"
    page.execute_script(hide + "document.dispatchEvent(new Event('visibilitychange'))", True)

    def asks_no_more() -> bool:
        before = len(stub.asked)
        time.sleep(1.4)  # it asks every second; at first something may be under way
        return len(stub.asked) == before

    eventually(asks_no_more)
    before = len(stub.asked)
    page.execute_script(hide + "document.dispatchEvent(new Event('visibilitychange'))", False)
    eventually(lambda: len(stub.asked) > before)


WORDS = "h1, h2, h3, p, b, dt, dd, th, td, li, li span, time, label, button, .badge, .kind, .note, svg text"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_words_stand_out_and_colours_can_be_turned(page: Any, stub: Stub, scheme: str) -> None:
    measures = {"entropy": {"adapted": 0.01, "source": 0.62, "limit": 0.125}}
    stub.set(adapter={"state": "guarded"}, guard={"ok": False, "reasons": ["low"], "measures": measures})
    colours(page, scheme)
    open_page(page, stub)
    back = "return Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]) < 60"
    assert page.execute_script(back) == (scheme == "dark")
    found = contrasts(page, WORDS)
    assert len(found) > 150
    assert [pair for pair in found if pair[0] < 4.5] == []
    element(page, "theme").click()
    assert page.execute_script(back) == (scheme != "dark")
    page.refresh()
    assert page.execute_script(back) == (scheme != "dark"), "the choice stays"
    element(page, "theme").click()
    colours(page, "light" if scheme == "dark" else "dark")
    eventually(lambda: page.execute_script(back) == (scheme != "dark"))  # the system's own is followed again


def test_a_phone_shows_it_without_scrolling_sideways(page: Any, stub: Stub) -> None:
    resize(page, 390)
    open_page(page, stub)
    assert page.execute_script("return document.documentElement.scrollWidth") <= 390
    for chart in page.find_elements("css selector", ".chart svg"):
        assert 280 < chart.size["width"] <= 390
    sizes = "return [...document.querySelectorAll('p, b, td, th, dd, dt, li, button, svg text')].map("
    assert min(page.execute_script(sizes + "e => parseFloat(getComputedStyle(e).fontSize))")) >= 12
    element(page, "rollback").click()
    assert element(page, "ask").size["width"] <= 390
    names = page.execute_script("return [...document.querySelectorAll('svg[role=img]')].map(e => e.ariaLabel)")
    assert len(names) == 6
    assert all(names)


@pytest.mark.parametrize("width", [390, 1300])
def test_the_words_of_charts_are_not_cut_off(page: Any, stub: Stub, width: int) -> None:
    resize(page, width)
    open_page(page, stub)
    lefts = "return [...document.querySelectorAll('.chart svg text')].map(e => e.getBBox().x)"
    eventually(lambda: "pause, snapshot" in texts(page, ".chart svg text"))
    assert min(page.execute_script(lefts)) >= 0
