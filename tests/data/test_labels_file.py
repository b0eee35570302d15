"""Labels from a CSV file, and the message for every mistake in one."""

from __future__ import annotations

from pathlib import Path

import pytest

from ttac.common.cells import csv_line
from ttac.data.labels_file import read_labels

FILES = ["a.png", "sub/b.png"]


def read(tmp_path: Path, content: bytes, classes: tuple[str, ...] | None = ("cat", "dog", "2")) -> dict[str, int]:
    (tmp_path / "labels.csv").write_bytes(content)
    return read_labels(tmp_path / "labels.csv", FILES, 3, classes)


@pytest.mark.parametrize(
    "content",
    [
        b"file,label\na.png,dog\nsub/b.png,0\n",
        b"\xef\xbb\xbflabel,file\r\n1,a.png\r\n cat ,sub/b.png\r\n",
        b"file,label,confidence\nother.png,no class,1\na.png,1,0.5\na.png,dog,1\nsub/b.png,cat,\n",
    ],
)
def test_names_and_numbers_are_labels(content: bytes, tmp_path: Path) -> None:
    assert read(tmp_path, content) == {"a.png": 1, "sub/b.png": 0}


def test_a_name_that_looks_like_a_number_is_a_name(tmp_path: Path) -> None:
    content = b"file,label\na.png,2\nsub/b.png,0\n"
    assert read(tmp_path, content, ("2", "1", "0")) == {"a.png": 0, "sub/b.png": 2}
    assert read(tmp_path, content, None) == {"a.png": 2, "sub/b.png": 0}


def test_names_of_files_need_not_be_text(tmp_path: Path) -> None:
    name = b"\xff.png".decode(errors="surrogateescape")
    (tmp_path / "labels.csv").write_bytes(b"file,label\n\xff.png,1\n")
    assert read_labels(tmp_path / "labels.csv", [name], 2, None) == {name: 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must begin with the line file,label"),
        (b"a.png,dog\n", "must begin with the line file,label"),
        (b"file,label\na.png,dog\n", r"has no label for 1 of 2 images: 'sub/b.png'"),
        (b"file,label\na.png,bird\n", r"line 2: no class 'bird' \(names are cat, dog, 2; numbers are 0 to 2\)"),
        (b"file,label\na.png,3\n", "line 2: no class '3'"),
        (b"file,label\na.png,-1\n", "line 2: no class '-1'"),
        (b"file,label\na.png\n", "line 2: no class ''"),
        (b"file,label\na.png,dog\na.png,cat\n", "line 3: 'a.png' has two labels"),
        (b"file,label\n" + b"x" * 2**18 + b",1\n", "is no CSV"),
    ],
)
def test_mistakes_are_told(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, content)


def test_a_name_of_two_classes_says_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no class 'cat'"):
        read(tmp_path, b"file,label\na.png,cat\n", ("cat", "cat", "dog"))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no labels file"):
        read_labels(tmp_path / "labels.csv", FILES, 3, None)


def test_names_are_read_as_predictions_are_written(tmp_path: Path) -> None:
    names = ["=1+1.png", "'=1.png", "-cat.png"]
    path = tmp_path / "labels.csv"
    path.write_text(csv_line("file", "label") + "".join(csv_line(name, "@dog") for name in names))
    assert read_labels(path, names, 2, ["cat", "@dog"]) == dict.fromkeys(names, 1)
