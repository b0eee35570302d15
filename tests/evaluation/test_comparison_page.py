"""The table and the page of a comparison: they fit, they escape, they load nothing."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
import torch
from rich.console import Console
from torch import Tensor

from ttac.data.folder import UnreadableImageError
from ttac.evaluation.comparison import Change
from ttac.evaluation.comparison_page import class_namer, render_page, terminal_table

EVIL = ("<script>alert(1)</script>", "\"><img src=x onerror='alert(2)'>")
LONG = ("a class with a name that is much longer than any column of a terminal ever was", "short")


def summary(classes: int = 2, error: float | None = None) -> dict[str, object]:
    model = {
        "confidence": 0.5, "entropy": None, "classes_in_use": 1.5, "counts": [3, 1, *[0] * (classes - 2)],
        "anchor_distance": 1.25, "error": error, "seconds_an_image": 0.0123,
    }  # fmt: skip
    names = ("frozen", "bn", "adapted")
    return {
        "images": 4,
        "models": {name: {**model, "differs_from": {o: 0.25 for o in names if o != name}} for name in names},
    }


def page(names: tuple[str, ...] = EVIL, **more: object) -> str:
    changes = [Change(names[0], 0, 0.5, 1, 0.9, None), Change("gone.png", 1, 0.4, 0, 0.8, 1)]

    def read(file: str) -> Tensor:
        if file == "gone.png":
            raise UnreadableImageError("not there")
        return torch.rand(3, 200, 100)

    facts = {"Images": names[1]}
    return render_page(summary(**more), changes, method=names[0], facts=facts, name=class_namer(names), read=read)


class Tags(HTMLParser):
    """Notes tags and what they link to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.add(tag)
        self.attributes += attrs
        if tag not in ("meta", "link", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_names_from_outside_are_text_and_nothing_is_loaded() -> None:
    text, tags = page(), Tags()
    tags.feed(text)
    assert not tags.open
    assert "script" not in tags.found
    assert not any(name.startswith("on") for name, _ in tags.attributes)
    links = [value or "" for name, value in tags.attributes if name in ("src", "href")]
    assert links
    assert all(link.startswith("data:") for link in links)
    assert not re.search(r"https?:|url\(|@import", text)
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in text
    assert "prefers-color-scheme: dark" in text
    for name in EVIL:
        assert name not in text
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;") > 2
    assert "cannot be read any more" in text


def test_many_classes_and_labels_are_told() -> None:
    assert "5 more are left out" in page(("a", "b", *map(str, range(23))), classes=25)
    assert "left out" not in page()
    assert "none is an error" in page()
    assert "by the labels that were given" in page(error=12.5)


@pytest.mark.parametrize("names", [EVIL, LONG])
def test_the_table_fits_a_terminal_of_eighty_columns(names: tuple[str, str]) -> None:
    console = Console(width=80, record=True, force_terminal=False, soft_wrap=True)
    with console.capture() as captured:
        console.print(terminal_table(summary(), "A method with a long title", class_namer(names)), soft_wrap=False)
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("differs from" in line for line in lines) == 2
    assert not any("error" in line for line in lines), "what is not known has no row"
    assert names[0][:10] in "".join(lines)
