"""One entry to all data: every layout is recognised, read lazily, and refused by name where it is wrong."""

from __future__ import annotations

import os
import struct
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data_helpers import read_data
from ttac.cli import main
from ttac.data.sets import find_data, image_files
from ttac.data.sets.check import check_data
from ttac.data.sets.specs import SPECS

COUNT = 6  # images at each severity


def pixels(count: int = COUNT, side: int = 32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), dtype=np.uint8)


def save_images(folder: Path, images: np.ndarray, suffix: str = "png") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{number:03d}.{suffix}")
    return folder


def channels_first(images: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2)


@pytest.fixture
def corrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CIFAR-10-C with two corruptions of a few images."""
    for name in ("cifar10-c", "cifar100-c"):
        monkeypatch.setitem(SPECS, name, replace(SPECS[name], counts={"test": COUNT}))
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    for seed, name in enumerate(("fog", "snow")):
        np.save(folder / f"{name}.npy", pixels(5 * COUNT, seed=seed))
    np.save(folder / "labels.npy", np.tile(np.arange(COUNT, dtype=np.uint8), 5))
    return folder


def test_a_severity_of_cifar_c_is_a_fifth_of_its_array(corrupted: Path) -> None:
    for severity in range(1, 6):
        data = read_data("cifar10-c", root=corrupted.parent, domain="snow", severity=severity)
        rows = slice((severity - 1) * COUNT, severity * COUNT)
        assert torch.equal(data.read(torch.arange(COUNT)), channels_first(pixels(5 * COUNT, seed=1)[rows]))
        assert data.labels.tolist() == list(range(COUNT))
        assert (data.num_classes, data.classes) == (10, SPECS["cifar10"].classes)
    np.save(corrupted / "labels.npy", np.arange(COUNT))  # of one severity, and so of all
    assert read_data(str(corrupted), domain="fog", severity=3).labels.tolist() == list(range(COUNT))
    assert read_data(str(corrupted), domain="fog", severity=3).num_classes == COUNT  # no name, so no more is known


def test_what_is_wrong_with_cifar_c_is_said(corrupted: Path) -> None:
    name = f"cifar10-c={corrupted}"
    for options, message in (
        ({"severity": 5}, "cifar10-c is corrupted already: name one of its domains"),
        ({"domain": "frog", "severity": 5}, "did you mean fog"),
        ({"domain": "fog"}, "cifar10-c has the severities 1, 2, 3, 4, 5: choose one"),
        ({"domain": "fog", "severity": 6}, "choose one"),
        ({"domain": "fog", "severity": 1, "split": "train"}, "no train images: choose test; it is a shift of cifar10"),
    ):
        with pytest.raises(ValueError, match=message):
            read_data(name, **options)  # type: ignore[arg-type]
    whole = (corrupted / "fog.npy").read_bytes()
    (corrupted / "fog.npy").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"fog.npy is not a readable array"):
        read_data(name, domain="fog", severity=1)
    for array, message in (
        (pixels(5 * COUNT - 5), rf"labels.npy has uint8 .*expected {5 * COUNT - 5} integers"),
        (pixels(5 * COUNT).astype(float), r"CIFAR-10-C/fog.npy has float64 .*expected uint8 \[N, H, W, C\]"),
        (pixels(5 * COUNT)[:, :0], r"CIFAR-10-C/fog.npy has uint8 .*expected uint8 \[N, H, W, C\]"),
        (pixels(5 * COUNT, side=16), r"fog.npy has images \(16, 16, 3\), cifar10-c \(32, 32, 3\)"),
    ):
        np.save(corrupted / "fog.npy", array)
        with pytest.raises(ValueError, match=message):
            read_data(name, domain="fog", severity=1)
    np.save(corrupted / "fog.npy", pixels(5 * COUNT))
    np.save(corrupted / "labels.npy", np.tile(np.arange(COUNT) + 5, 5))
    with pytest.raises(ValueError, match=r"labels.npy: labels must be in 0..9; got 5..10"):
        read_data(name, domain="fog", severity=1)
    np.save(corrupted / "snow.npy", pixels(5 * COUNT + 5))
    np.save(corrupted / "labels.npy", np.zeros(5 * COUNT + 5, np.int64))
    with pytest.raises(ValueError, match=rf"snow.npy has {COUNT + 1} images, cifar10-c has {COUNT}: it is not whole"):
        read_data(name, domain="snow", severity=1)
    assert len(read_data(str(corrupted), domain="snow", severity=1)) == COUNT + 1  # as it is, under no name
    with (corrupted / "snow.npy").open("wb") as file:
        np.savez(file, a=np.zeros(3))
    with pytest.raises(ValueError, match=r"snow.npy is not a readable array"):
        read_data(str(corrupted), domain="snow", severity=1)


def test_what_ttac_corrupt_writes_is_read(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    np.save(source / "test_images.npy", pixels(4, side=24))
    np.save(source / "test_labels.npy", np.array([2, 0, 1, 1]))
    out = tmp_path / "out"
    assert main(["corrupt", "--data", str(source), "--out", str(out), "--corruptions", "contrast"]) == 0
    written = np.load(out / "contrast.npy")
    for severity in (1, 5):
        data = read_data(str(out), domain="contrast", severity=severity)
        assert (data.size, data.labels.tolist()) == ((24, 24), [2, 0, 1, 1])
        expected = written[4 * (severity - 1) : 4 * severity]
        assert torch.equal(data.read(torch.arange(4)), channels_first(expected))


def test_cifar_10_1_has_two_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SPECS, "cifar10.1", replace(SPECS["cifar10.1"], counts={"v6": 4, "v4": 3}))
    folder = tmp_path / "CIFAR-10.1" / "datasets"  # as in the authors' repository
    folder.mkdir(parents=True)
    for version, count in (("v4", 3), ("v6", 4)):
        np.save(folder / f"cifar10.1_{version}_data.npy", pixels(count, seed=count))
        np.save(folder / f"cifar10.1_{version}_labels.npy", np.arange(count, dtype=np.int32))
    for domain, count in ((None, 4), ("v6", 4), ("v4", 3)):
        data = read_data("cifar10.1", root=tmp_path, domain=domain)
        assert torch.equal(data.read(torch.arange(count)), channels_first(pixels(count, seed=count)))
        assert (len(data), data.num_classes) == (count, 10)
    assert read_data(str(folder)).classes == SPECS["cifar10"].classes  # the names of the files tell
    with pytest.raises(ValueError, match=r"unknown version of CIFAR-10.1: 'v5'"):
        read_data(str(folder), domain="v5")
    with pytest.raises(ValueError, match="has no severities"):
        read_data(str(folder), severity=1)


def test_pairs_of_arrays_are_one_part(tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", pixels())
    np.save(tmp_path / "labels.npy", np.arange(COUNT) % 3)
    for split in (None, "train", "test"):
        data = read_data(str(tmp_path), split=split)
        assert torch.equal(data.read(torch.tensor([4, 1])), channels_first(pixels())[[4, 1]])
        assert (data.num_classes, data.classes) == (3, None)
    with pytest.raises(ValueError, match="has no domains: leave 'fog' out"):
        read_data(str(tmp_path), domain="fog")
    with pytest.raises(ValueError, match=r"does not hold cifar10-c: expected labels.npy and one .npy for each"):
        read_data(f"cifar10-c={tmp_path}", domain="fog", severity=1)


@pytest.mark.parametrize(
    "shape", ["True", "(True, 32, 32, 3)", "(-1, 32, 32, 3)", "(2**63, 2)", f"({2**63 - 1}, 2)", f"({10**23},)"]
)
def test_forged_arrays_are_named(shape: str, tmp_path: Path) -> None:
    np.save(tmp_path / "labels.npy", np.zeros(4, np.int64))
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}}}".encode().ljust(117) + b"\n"
    (tmp_path / "images.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + header + bytes(3072))
    with pytest.raises(ValueError, match=r"[/\\]images.npy "):
        read_data(str(tmp_path))
    (tmp_path / "images.npy").write_bytes(b"PK\x03\x04 and no archive")
    with pytest.raises(ValueError, match=r"images.npy is not a readable array"):
        read_data(str(tmp_path))


@pytest.mark.parametrize("label", [10**6, 10**12, 2**63 - 1, np.timedelta64(1, "s")])
def test_labels_are_no_absurd_number_of_classes(label: int | np.timedelta64, tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", pixels())
    np.save(tmp_path / "labels.npy", np.array([label] * COUNT))
    with pytest.raises(ValueError, match=r"labels.npy has (the label \d+, which must be below 1000000|timedelta64)"):
        read_data(str(tmp_path))


def test_arrays_of_a_name_are_counted(tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", pixels())
    np.save(tmp_path / "labels.npy", np.arange(COUNT))
    with pytest.raises(ValueError, match=r"does not hold cifar10-jpg: expected \{train,test\}_\{images,labels\}.npy"):
        read_data(f"cifar10-jpg={tmp_path}", split="test")
    np.save(tmp_path / "test_images.npy", pixels())
    np.save(tmp_path / "test_labels.npy", np.arange(COUNT))
    with pytest.raises(ValueError, match=rf"test_images.npy has {COUNT} images, cifar10-jpg has 10000"):
        read_data(f"cifar10-jpg={tmp_path}", split="test")


def test_digits_are_missing_without_scikit_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    findings = list(check_data(find_data("digits"), tmp_path))
    assert [(found.name, found.state) for found in findings] == [("train", "missing"), ("test", "missing")]
    assert all("pip install 'ttac[demo]'" in found.detail for found in findings)


@pytest.mark.parametrize("group", ["", "noise"])
def test_imagenet_c_is_found_with_and_without_its_archives_folders(
    group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SPECS, "imagenet-c", replace(SPECS["imagenet-c"], counts={"test": 4}, num_classes=2))
    place = tmp_path / "imagenet-c" / group / "shot_noise" / "5"
    save_images(place / "n02", pixels(2, 224), "JPEG")
    save_images(place / "n01", pixels(2, 224, seed=1), "JPEG")
    opened: list[str] = []
    read = image_files.read_levels
    monkeypatch.setattr(image_files, "read_levels", lambda path, *rest: opened.append(path.name) or read(path, *rest))
    data = read_data("imagenet-c", root=tmp_path, domain="shot_noise", severity=5)
    assert (data.labels.tolist(), data.classes, data.size) == ([0, 0, 1, 1], ("n01", "n02"), (224, 224))
    assert not opened  # nothing is decoded before it is read
    with Image.open(place / "n02/001.JPEG") as image:
        expected = np.array(image)
    assert torch.equal(data.read(torch.tensor([3]))[0], channels_first(expected[None])[0])
    assert opened == ["001.JPEG"]
    assert read_data(str(tmp_path / "imagenet-c"), domain="shot_noise", severity=5).classes == ("n01", "n02")
    with pytest.raises(FileNotFoundError, match=r"no folder .*shot_noise/4"):
        read_data("imagenet-c", root=tmp_path, domain="shot_noise", severity=4)
    save_images(place / "n03", pixels(1, 224), "JPEG")
    with pytest.raises(ValueError, match="has 3 class subfolders, imagenet-c has 2 classes"):
        read_data("imagenet-c", root=tmp_path, domain="shot_noise", severity=5)


@pytest.fixture
def visda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """VisDA-C with two classes of images of unequal sizes."""
    spec = replace(SPECS["visda-c"], counts={"train": 3, "validation": 2, "test": 2}, num_classes=2)
    monkeypatch.setitem(SPECS, "visda-c", replace(spec, classes=("plant", "train")))
    for split, seed in (("train", 0), ("validation", 1)):
        save_images(tmp_path / "visda-c" / split / "train", pixels(1, 40, seed))
        save_images(tmp_path / "visda-c" / split / "plant", pixels(2 if split == "train" else 1, 30, seed + 5))
    return tmp_path / "visda-c"


def test_visda_is_read_by_folders_or_by_lists(visda: Path) -> None:
    by_folders = [read_data("visda-c", root=visda.parent, split=split) for split in ("train", "test")]
    assert [data.labels.tolist() for data in by_folders] == [[0, 0, 1], [0, 1]]
    assert [data.size for data in by_folders] == [(224, 224)] * 2  # the data set's own, as sizes differ
    (visda / "train/image_list.txt").write_text("train/000.png 1\nplant/001.png 0\nplant/000.png 0\n")
    by_list = read_data("visda-c", root=visda.parent, split="train")
    assert by_list.labels.tolist() == [1, 0, 0]
    rows = torch.tensor([2, 1, 0])
    assert torch.equal(by_list.read(rows), by_folders[0].read(torch.arange(3)))
    assert torch.equal(
        read_data(str(visda / "train/image_list.txt"), size=(224, 224), crop_pct=0.875).read(rows), by_list.read(rows)
    )
    assert find_data(str(visda)).splits == ("train", "test")
    assert find_data(str(visda / "train")).splits == ()  # a class has the name of a split
    save_images(visda / "test" / "trunk00", pixels(2))
    with pytest.raises(ValueError, match=r"test: subfolders that are no class .*: trunk00 \(or image_list.txt in it"):
        read_data("visda-c", root=visda.parent, split="test", domain="test")
    (visda / "test/image_list.txt").write_text("trunk00/000.png 1\ntrunk00/001.png 0\n")
    assert read_data(f"visda-c={visda}", split="test", domain="test").labels.tolist() == [1, 0]
    assert read_data(f"visda-c={visda}", split="test").labels.tolist() == [0, 1]  # the validation images, as before
    with pytest.raises(ValueError, match="visda-c has several parts: choose train or test"):
        read_data(f"visda-c={visda}")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/etc/hostname 0", r"line 2: /etc/hostname leads out"),
        ("../secret.png 0", r"line 2: \.\./secret.png leads out"),
        ("a/../../secret.png 0", "leads out"),
        ("out/secret.png 0", "leads out"),
        ("link.png 0", "leads out"),
        ("a/999.png 0", r"a/999.png, line 2 of list.txt, is missing"),
        ("a/000.png", r"line 2: expected a path and a label, not 'a/000.png'"),
        ("a/000.png -1", "expected a path and a label"),
        ("a/000.png 1.5", "expected a path and a label"),
        ("a/000.png 3", r"line 2: label 3 is not in 0..2"),
        ("\na/000.png 3", r"line 3: label 3 is not in 0..2"),
    ],
)
def test_a_list_leads_nowhere_else(line: str, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    save_images(folder / "a", pixels(1, 8))
    save_images(tmp_path, pixels(1, 8))
    (tmp_path / "000.png").rename(tmp_path / "secret.png")
    (folder / "out").symlink_to(tmp_path)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "list.txt").write_text(f"a/000.png 1\n{line}\na/000.png 0\n")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_data(str(folder / "list.txt"), classes=("a", "b", "c"))


def test_lists_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("")
    with pytest.raises(ValueError, match=r"list.txt lists no images"):
        read_data(str(tmp_path / "list.txt"))
    np.save(tmp_path / "a.npy", pixels())
    with pytest.raises(ValueError, match=r"a.npy is neither a folder nor a list of images"):
        read_data(str(tmp_path / "a.npy"))


def test_splits_in_folders_serve_training(tmp_path: Path) -> None:
    for split, count in (("train", 3), ("val", 2)):
        for name in ("b", "a"):
            save_images(tmp_path / split / name, pixels(count, 8))
    assert find_data(str(tmp_path)).splits == ("train", "test")
    assert len(read_data(str(tmp_path), split="train")) == 6
    assert read_data(str(tmp_path), split="test").labels.tolist() == [0, 0, 1, 1]
    assert len(read_data(str(tmp_path / "train"))) == 6


def test_a_name_without_data_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TTAC_DATA", str(tmp_path / "root"))
    with pytest.raises(FileNotFoundError, match=r"cifar10 is not in .*root: `ttac data fetch cifar10` gets it"):
        read_data("cifar10", split="train")
    with pytest.raises(FileNotFoundError, match=r"imagenet is not in .*image-net.org/download.*root/imagenet/train"):
        read_data("imagenet", split="train")
    (tmp_path / "cifar10").mkdir()
    with pytest.raises(FileNotFoundError, match=r"for the folder cifar10 of here, write ./cifar10"):
        read_data("cifar10", split="train")
    with pytest.raises(FileNotFoundError, match=r"no folder cifr10, and no data set .*; did you mean cifar10"):
        read_data("cifr10")
    with pytest.raises(FileNotFoundError, match="no folder nowhere"):
        read_data("cifar10=nowhere", split="train")
    (tmp_path / "root/imagenet").mkdir(parents=True)  # an empty folder is no data set
    with pytest.raises(FileNotFoundError, match="imagenet is not in"):
        read_data("imagenet", split="train")


def test_a_folder_that_is_not_readable_is_no_smaller_folder(tmp_path: Path) -> None:
    save_images(tmp_path / "a", pixels(1, 8))
    (tmp_path / "b").mkdir(mode=0)
    if os.access(tmp_path / "b", os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(PermissionError):
        read_data(str(tmp_path))
