"""A headless Chromium for tests of pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium", reason="the browser is driven by selenium: pip install 'ttac[test]'")

from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.chrome.service import Service

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--disable-dev-shm-usage",
)  # fmt: skip


@contextmanager
def chromium(profile: Path) -> Iterator[Any]:
    """Start a browser that keeps its files in `profile`, or skip the test and say why."""
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in programs:
        pytest.skip("chromium and chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = str(programs[0])
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    try:
        driver = webdriver.Chrome(options=options, service=Service(str(programs[1])))
    except WebDriverException as error:
        pytest.skip(f"the browser does not start: {error.msg}")
    try:
        yield driver
    finally:
        driver.quit()


def resize(browser: Any, width: int) -> None:
    """Give the page a width in pixels; a narrow one is that of a phone."""
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 600},
    )


def colours(browser: Any, scheme: str) -> None:
    """Wish for dark or light colours, and for nothing that moves."""
    wishes = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
    features = [{"name": name, "value": value} for name, value in wishes.items()]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


CONTRAST = """
const light = (text) => {
  const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
    .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b;
};
const behind = (element) => {
  for (let e = element; e; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor;
    if (!/, 0\\)$/.test(colour)) return colour;
  }
};
return [...document.querySelectorAll(arguments[0])].filter(e => e.getClientRects().length && e.textContent).map(e => {
  const style = getComputedStyle(e);
  const pair = [light(e instanceof SVGElement ? style.fill : style.color), light(behind(e))];
  return [(Math.max(...pair) + .05) / (Math.min(...pair) + .05), e.textContent.trim().slice(0, 40)];
});
"""


def contrasts(browser: Any, selector: str) -> list[tuple[float, str]]:
    """Give the contrast of all words that are shown with what is behind them (WCAG), and the words."""
    return [(contrast, words) for contrast, words in browser.execute_script(CONTRAST, selector)]
