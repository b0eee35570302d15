"""CIFAR's own files: both versions give the same images, and damaged, wrong or hostile ones are refused by name."""

from __future__ import annotations

import os
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_helpers import read_data
from ttac.data.sets import find_data, pickles
from ttac.data.sets.pickles import load_plain
from ttac.data.sets.specs import SPECS

TRAIN, TEST = 20, 4  # images, in batches of four where there are five
CLASSES = {"cifar10": 10, "cifar100": 100}
BATCHES = [f"data_batch_{number}" for number in range(1, 6)]


@pytest.fixture(autouse=True)
def few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CLASSES:
        monkeypatch.setitem(SPECS, name, replace(SPECS[name], counts={"train": TRAIN, "test": TEST}, md5={}))


def content(name: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    rng, count = np.random.default_rng(split == "test"), TRAIN if split == "train" else TEST
    return rng.integers(0, 256, (count, 3072), dtype=np.uint8), rng.integers(0, CLASSES[name], count)


def as_python_2(data: np.ndarray, labels: list[int], key: str) -> bytes:
    """Pickle as Python 2 did with protocol 2: texts are bytes of no encoding, and the array's pixels are one."""

    def text(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    dtype = b"cnumpy\ndtype\n(" + text(b"u1") + number(0) + number(1) + b"tR(" + number(3) + text(b"|") + b"NNN"
    dtype += number(-1) + number(-1) + number(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(" + number(0) + b"t" + text(b"b") + b"tR("
    array += (
        number(1) + b"(" + b"".join(map(number, data.shape)) + b"t" + dtype + b"\x89" + text(data.tobytes()) + b"tb"
    )
    listed = b"](" + b"".join(map(number, labels)) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(key.encode()) + listed + b"u."


def as_now(protocol: int) -> Callable[[np.ndarray, list[int], str], bytes]:
    return lambda data, labels, key: pickle.dumps({b"data": data, key.encode(): labels}, protocol=protocol)


def write_python(folder: Path, name: str, dump: Callable[[np.ndarray, list[int], str], bytes] = as_python_2) -> Path:
    folder.mkdir(parents=True)
    files = {"train": BATCHES, "test": ["test_batch"]} if name == "cifar10" else {"train": ["train"], "test": ["test"]}
    key = "labels" if name == "cifar10" else "fine_labels"
    for split, names in files.items():
        data, labels = content(name, split)
        for number, file in enumerate(names):
            rows = slice(number * len(data) // len(names), (number + 1) * len(data) // len(names))
            (folder / file).write_bytes(dump(data[rows], labels[rows].tolist(), key))
    return folder


def write_binary(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        data, labels = content(name, split)
        columns = [labels[:, None].astype(np.uint8), data]
        if name == "cifar100":
            columns.insert(0, np.full((len(data), 1), 255, np.uint8))  # coarse labels, which nobody reads
        records = np.concatenate(columns, 1)
        if name == "cifar100" or split == "test":
            (folder / ("test_batch.bin" if name == "cifar10" else f"{split}.bin")).write_bytes(records.tobytes())
        else:
            for number, file in enumerate(BATCHES):
                (folder / f"{file}.bin").write_bytes(records[4 * number : 4 * number + 4].tobytes())
    return folder


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("version", ["python 2", "protocol 2", "protocol 4", "binary"])
def test_all_versions_hold_the_same(name: str, version: str, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    if version == "binary":
        write_binary(folder, name)
    else:
        write_python(folder, name, as_python_2 if version == "python 2" else as_now(int(version[-1])))
    for split in ("train", "test"):
        expected, labels = content(name, split)
        data = read_data(str(folder), split=split)
        assert torch.equal(data.read(torch.arange(len(data))).flatten(1), torch.from_numpy(expected))
        assert data.labels.tolist() == labels.tolist()
        assert (data.num_classes, data.classes) == (CLASSES[name], SPECS[name].classes)
        assert (data.channels, data.size, data.flip) == (3, (32, 32), True)


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("", "cifar10"),
        ("cifar-10-batches-py", "cifar10"),
        ("cifar10/cifar-10-batches-bin", "cifar10"),
        ("cifar100/cifar-100-python", "cifar100"),
        ("cifar-100-binary", "cifar100"),
    ],
)
def test_files_are_found_at_the_usual_places(place: str, name: str, tmp_path: Path) -> None:
    write = write_binary if place.endswith(("bin", "binary")) else write_python
    write(tmp_path / "root" / place, name)
    found = find_data(name, tmp_path / "root") if place else find_data(f"{name}={tmp_path / 'root'}")
    assert (found.path, found.splits) == (tmp_path / "root" / place, ("train", "test"))
    if not place.startswith("cifar1"):
        assert find_data(str(tmp_path / "root")).path == found.path  # told apart by the names of the files


def test_what_holds_both_is_not_guessed(tmp_path: Path) -> None:
    write_python(tmp_path / "cifar-10-batches-py", "cifar10")
    write_binary(tmp_path / "cifar-100-binary", "cifar100")
    with pytest.raises(ValueError, match=r"holds cifar10 and cifar100: write cifar10=.* or cifar100="):
        find_data(str(tmp_path))
    assert read_data(f"cifar100={tmp_path}", split="test").num_classes == 100
    with pytest.raises(ValueError, match=r"does not hold cifar10: expected data_batch_1, .*test_batch"):
        find_data(f"cifar10={tmp_path / 'cifar-100-binary'}")


def test_class_names_can_be_others(tmp_path: Path) -> None:
    folder = str(write_binary(tmp_path / "files", "cifar10"))
    assert read_data(folder, split="test", classes=tuple("abcdefghij")).classes == tuple("abcdefghij")
    with pytest.raises(ValueError, match="there are 3 class names for 10 classes"):
        read_data(folder, split="test", classes=("a", "b", "c"))


def refused(folder: Path, message: str, split: str = "train") -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_data(str(folder), split=split)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder = write_python(tmp_path / "python", "cifar10")
    batch = folder / "data_batch_3"
    whole = batch.read_bytes()
    for half in (whole[: len(whole) // 2], b"", whole[:-1]):
        batch.write_bytes(half)
        refused(folder, "data_batch_3 is damaged or not what its name says")
    data, labels = content("cifar10", "train")
    batch.write_bytes(as_python_2(data[:3], labels[:3].tolist(), "labels"))
    refused(folder, r"data_batch_3 has 3 images and 3 labels, expected 4")
    batch.write_bytes(as_python_2(data[:4], labels[:3].tolist(), "labels"))
    refused(folder, r"data_batch_3 has 4 images and 3 labels, expected 4")
    batch.write_bytes(as_python_2(data[:4], [0, 1, 10, 2], "labels"))
    refused(folder, r"data_batch_3: labels must be in 0..9; got 0..10")
    batch.write_bytes(as_python_2(data[:4, :100], [0, 1, 3, 2], "labels"))
    refused(folder, r"data_batch_3 holds no uint8 images \[N, 3072\]")
    batch.write_bytes(as_python_2(data[:4], [0, 1, 3, 2], "fine_labels"))
    refused(folder, r"data_batch_3 holds no whole numbers under 'labels'")
    for labels_list in ([0, [1, 2], 3, 4], [0, 1, 2, True], [0, 1, 2, 10**30], []):
        batch.write_bytes(pickle.dumps({"data": data[:4], "labels": labels_list}))
        refused(folder, r"data_batch_3[: ]")
    batch.write_bytes(pickle.dumps([1, 2]))
    refused(folder, r"data_batch_3 holds no uint8 images")
    batch.unlink()
    refused(folder, "data_batch_3 is missing")

    folder = write_binary(tmp_path / "binary", "cifar100")
    file = folder / "test.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:-7])
    refused(folder, r"test.bin has 12289 bytes, which are not records of 3074: it is cut off", "test")
    file.write_bytes(whole[: 2 * 3074])
    refused(folder, r"test.bin has 2 images .* expected 4", "test")
    file.write_bytes(b"\0\x64" + whole[2:])
    refused(folder, r"test.bin: labels must be in 0..99; got .*100", "test")


class Hostile:
    """Pickles as a call."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call[0], tuple(self.call[1:])


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_pickle_runs_nothing(protocol: int, wrapped: bool, tmp_path: Path) -> None:
    folder, trace = write_python(tmp_path / "files", "cifar10"), tmp_path / "trace"
    attack = Hostile(os.system, f"touch {trace}")
    value = {"data": np.zeros((4, 3072), np.uint8), "labels": [0] * 4, "more": attack} if wrapped else attack
    (folder / "data_batch_2").write_bytes(pickle.dumps(value, protocol=protocol))
    refused(folder, r"data_batch_2 is damaged .*: it asks for (posix|nt|os)\.system")
    assert not trace.exists()


@pytest.mark.parametrize(
    "opcodes",
    [
        b"cnumpy\nndarray\n(J\x00\x00\x00\x7ftR.",  # calls the array type itself
        b"cbuiltins\neval\n(X\x03\x00\x00\x001+1tR.",
        b"cnumpy\nload\n(X\x01\x00\x00\x00xtR.",
        b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",  # a frame of 2**63 bytes
    ],
)
def test_nothing_but_arrays_and_plain_values_comes_out(opcodes: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\x80\x02" + opcodes)
    with pytest.raises(ValueError, match="file is damaged or not what its name says"):
        load_plain(tmp_path / "file")
    array = np.arange(6, dtype=np.uint8).reshape(2, 3)
    (tmp_path / "array").write_bytes(pickle.dumps(array, protocol=2))  # the next file is read as ever
    assert np.array_equal(load_plain(tmp_path / "array"), array)


def test_codecs_are_not_the_files_to_choose(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\x80\x02c_codecs\nencode\n(X\x01\x00\x00\x00aX\x05\x00\x00\x00rot13tR.")
    assert load_plain(tmp_path / "file") == b"a"


class Made:
    """Pickles as a call and a state that is set thereafter."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


RECONSTRUCT, EMPTY, _ = np.zeros(1, np.uint8).__reduce__()
OCTETS = np.dtype("u1")
POINTERS = Made(np.dtype, ("V8", False, True), (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0))


@pytest.mark.parametrize(
    "forged",
    [
        np.array([None]),
        np.zeros(2, "f8"),
        Made(RECONSTRUCT, EMPTY, (1, (1,), POINTERS, False, bytes(8))),
        Made(RECONSTRUCT, EMPTY, (1, (2,), OCTETS, False, b"abc")),
        Made(RECONSTRUCT, EMPTY, (1, (-1,), OCTETS, False, b"")),
        Made(RECONSTRUCT, EMPTY, (1, (2**62, 2**62), OCTETS, False, b"")),
        Made(RECONSTRUCT, EMPTY, (1, (1,), OCTETS, False, [0])),
    ],
)
def test_arrays_are_of_bytes_and_whole(forged: object, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(pickle.dumps({"data": forged}, protocol=4))
    with pytest.raises(ValueError, match="file is damaged or not what its name says"):
        load_plain(tmp_path / "file")


@pytest.mark.parametrize("protocol", [2, 4])
def test_arrays_of_all_versions_are_read(protocol: int, tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.uint8).reshape(2, 3)
    for value in (array, np.asfortranarray(array)):
        dumped = pickle.dumps({"array": value}, protocol=protocol)
        older = dumped.replace(b"numpy._core.", b"numpy.core.")
        for version in (dumped, older) if protocol == 2 else (dumped,):  # protocol 4 has the lengths of the names
            (tmp_path / "file").write_bytes(version)
            loaded = load_plain(tmp_path / "file")["array"]
            assert loaded.dtype == np.uint8
            assert np.array_equal(loaded, value)


def test_lists_within_lists_are_no_labels(tmp_path: Path) -> None:
    folder, labels = write_python(tmp_path / "files", "cifar10"), [0, 1]
    for _ in range(20):  # a megabyte times eight as an array, and a few bytes as a pickle
        labels = [labels, labels]  # type: ignore[list-item]
    (folder / "test_batch").write_bytes(pickle.dumps({"data": content("cifar10", "test")[0], "labels": labels}))
    tracemalloc.start()
    try:
        refused(folder, r"test_batch holds no whole numbers under 'labels'", "test")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


TEXT = b"X" + (2**20).to_bytes(4, "little") + b"a" * 2**20 + b"q\x01"  # a megabyte of text that is remembered


@pytest.mark.parametrize(
    "opcodes",
    [
        TEXT + b"0](" + b"c_codecs\nencode\n(h\x01h\x01tR" * 100 + b"e.",  # a hundred copies of it
        b"Nr\xff\xff\xff\x0f.",  # a table of 2**28 objects
        b"(" + b"}" * 2**20 + b"l.",
    ],
)
def test_a_pickle_takes_little_more_memory_than_its_file(opcodes: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\x80\x02" + opcodes)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="file is damaged or not what its name says"):
            load_plain(tmp_path / "file")
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    finally:
        tracemalloc.stop()


def test_large_files_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(pickle.dumps([0] * 100))
    monkeypatch.setattr(pickles, "MAX_BYTES", 90)
    with pytest.raises(ValueError, match=r"file has \d+ bytes, at most 90 are read"):
        load_plain(tmp_path / "file")
