"""Digits drawn from fonts: the same everywhere, labelled rightly, and as grey as the handwritten ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from data_helpers import read_data
from ttac.cli import main
from ttac.data.labelled import LabelledImages
from ttac.data.sets import find_data
from ttac.data.sets.check import check_data
from ttac.data.sets.glyphs import PENS, draw_digit, draw_glyphs, font_folder

ft2font = pytest.importorskip("matplotlib.ft2font", reason="matplotlib ships the fonts: pip install 'ttac[report]'")


@pytest.fixture(scope="module")
def train() -> LabelledImages:
    return find_data("glyphs").read("train")


def extent(sheet: Image.Image) -> list[int]:
    left, top, right, bottom = sheet.getbbox() or (0, 0, 0, 0)
    return [right - left, bottom - top]


@pytest.mark.parametrize("font", PENS)
def test_each_font_has_ten_digits(font: str) -> None:
    reader = ft2font.FT2Font(str(font_folder() / font))
    names = [reader.get_glyph_name(reader.get_charmap()[ord(digit)]) for digit in "0123456789"]
    assert names == ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    drawn = [draw_digit(font_folder() / font, digit) for digit in range(10)]
    assert len({digit.tobytes() for digit in drawn}) == 10
    thick = [draw_digit(font_folder() / font, digit, stroke=2) for digit in range(10)]
    for thin, grown in zip(drawn, thick, strict=True):
        assert [side - 4 for side in extent(grown)] == extent(thin)


def test_what_is_drawn_depends_on_split_and_seed_alone() -> None:
    images, labels = draw_glyphs("test")
    other, others = draw_glyphs("test", seed=1)
    again, same = draw_glyphs("test")
    assert torch.equal(images, again)
    assert torch.equal(labels, same)
    assert not torch.equal(labels, others)
    assert len(torch.cat([images, other]).flatten(1).unique(dim=0)) > 1990  # hardly one image twice


def test_they_are_read_by_their_name(train: LabelledImages) -> None:
    assert find_data("glyphs").splits == ("train", "test")
    for data, count in ((train, 4000), (find_data("glyphs").read("test"), 1000)):
        assert (len(data), data.channels, data.size, data.flip) == (count, 1, (32, 32), False)
        assert data.classes == tuple("0123456789")
        assert data.labels.bincount().tolist() == [count // 10] * 10
        assert data.labels[:100].unique().numel() == 10  # not class by class


def test_they_are_handwritten_digits_but_for_the_hand(train: LabelledImages) -> None:
    pytest.importorskip("sklearn")
    written = read_data("digits", split="test")
    for ours, theirs in zip(train.pixel_moments(), written.pixel_moments(), strict=True):
        assert ours == pytest.approx(theirs, abs=0.02)
    (images, labels), (target, truth) = next(train.batches(4000)), next(written.batches(1000))
    means = torch.stack([images[labels == digit].mean(0) for digit in range(10)]).flatten(1)
    right = torch.cdist(target.flatten(1), means).argmin(1) == truth
    assert 0.45 < right.float().mean() < 0.8  # chance: 0.1; means of handwritten digits: about 0.9


def test_the_command_line_knows_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "list", "--json"]) == 0
    (row,) = [row for row in json.loads(capsys.readouterr().out) if row["name"] == "glyphs"]
    assert (row["classes"], row["images"], row["channels"]) == (10, {"train": 4000, "test": 1000}, 1)
    assert "matplotlib" in row["path"]
    assert main(["data", "check", "glyphs"]) == 0
    assert "glyphs is whole" in capsys.readouterr().out


def test_a_font_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("matplotlib.get_data_path", lambda: str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"no font .+\.ttf, which matplotlib comes with"):
        draw_glyphs("test")


def test_a_split_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown split: 'validation'"):
        draw_glyphs("validation")


def test_without_matplotlib_they_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'ttac\[report\]'"):
        read_data("glyphs", split="train")
    findings = list(check_data(find_data("glyphs"), tmp_path))
    assert [(found.name, found.state) for found in findings] == [("train", "missing"), ("test", "missing")]
    assert main(["data", "list", "--json"]) == 0
    paths = {row["name"]: row["path"] for row in json.loads(capsys.readouterr().out)}
    assert paths["glyphs"] is None
    assert main(["data", "fetch", "glyphs"]) == 2
    assert "pip install 'ttac[report]'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["digits", "glyphs"])
def test_what_comes_with_a_package_has_no_path(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{name} comes with .+ and has no path: leave ={tmp_path} out"):
        find_data(f"{name}={tmp_path}")
