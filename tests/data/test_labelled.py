"""Source data in all their forms give the same images and labels, and say what is wrong with them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from data_helpers import read_data
from ttac.data import labelled
from ttac.data.labelled import LabelledImages, from_tensors
from ttac.data.sets import find_data, image_files

COUNT = 12


@pytest.fixture
def pixels() -> torch.Tensor:
    return torch.randint(0, 256, (COUNT, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def save_arrays(folder: Path, pixels: torch.Tensor, split: str = "train") -> Path:
    folder.mkdir(exist_ok=True)
    np.save(folder / f"{split}_images.npy", pixels.permute(0, 2, 3, 1).numpy())
    np.save(folder / f"{split}_labels.npy", np.arange(len(pixels), dtype=np.uint8) % 3)
    return folder


def save_folder(folder: Path, pixels: torch.Tensor) -> Path:
    for number, image in enumerate(pixels):
        path = folder / "abc"[number % 3] / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    return folder


def read(data: str, **options: Any) -> LabelledImages:
    return read_data(data, split="train", **options)


def test_arrays_and_tensors_hold_the_same(tmp_path: Path, pixels: torch.Tensor) -> None:
    mapped = read(str(save_arrays(tmp_path / "arrays", pixels)))
    direct = from_tensors(pixels, torch.arange(COUNT) % 3, 3)
    rows = torch.tensor([5, 0, 11])
    assert torch.equal(mapped.read(rows), direct.read(rows))
    assert torch.equal(mapped.read(rows), pixels[rows])
    assert torch.equal(mapped.labels, direct.labels)
    assert (mapped.size, mapped.channels, mapped.num_classes) == ((8, 8), 3, 3)
    assert mapped.pixel_moments() == direct.pixel_moments()


@pytest.mark.parametrize("kept", [True, False])
def test_a_folder_is_kept_decoded_or_read_anew(
    kept: bool, tmp_path: Path, pixels: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kept:
        monkeypatch.setattr(labelled, "KEPT_BYTES", 100)
    folder = save_folder(tmp_path / "images", pixels)
    data = read(str(folder)).in_memory()
    for path in folder.rglob("*.png"):
        if kept:
            path.unlink()  # nothing is read again
    order = torch.arange(COUNT).reshape(-1, 3).T.flatten()  # files are sorted by class
    assert torch.equal(data.read(torch.arange(COUNT)), pixels[order])
    assert torch.equal(data.labels, order % 3)
    assert data.classes == ("a", "b", "c")


def test_pixel_moments_are_those_of_all_pixels(pixels: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labelled, "CHUNK", 5)
    mean, std = from_tensors(pixels, torch.arange(COUNT) % 3, 3).pixel_moments()
    scaled = pixels.double() / 255
    torch.testing.assert_close(torch.tensor(mean).double(), scaled.mean((0, 2, 3)).float().double())
    torch.testing.assert_close(
        torch.tensor(std).double(), scaled.transpose(0, 1).flatten(1).std(1, correction=0).float().double()
    )


def test_a_split_is_whole_and_repeats_itself(pixels: torch.Tensor) -> None:
    data = from_tensors(pixels, torch.arange(COUNT), COUNT)
    first, second = data.split(0.25, seed=1), data.split(0.25, seed=1)
    assert [len(part) for part in first] == [9, 3]
    assert torch.equal(torch.cat([part.labels for part in first]).sort().values, torch.arange(COUNT))
    assert torch.equal(first[1].labels, second[1].labels)
    assert torch.equal(first[1].read(torch.tensor([2])), pixels[first[1].labels[2:3]])
    with pytest.raises(ValueError, match="leaves nothing of 1 images"):
        from_tensors(pixels[:1], torch.zeros(1).long(), 1).split(0.9, 0)


def test_what_is_kept_apart_for_validation(tmp_path: Path, pixels: torch.Tensor) -> None:
    folder = save_arrays(tmp_path / "arrays", pixels)
    assert find_data(str(folder)).splits == ("train",)
    with pytest.raises(ValueError, match="has no test images: choose train"):
        read_data(str(folder), split="test")
    save_arrays(folder, pixels[:4], "test")
    assert len(read_data(str(folder), split="test")) == 4
    assert find_data(str(save_folder(tmp_path / "images", pixels))).splits == ()


def test_digits_are_not_to_be_mirrored() -> None:
    pytest.importorskip("sklearn")
    train, test = read("digits"), read_data("digits", split="test")
    assert (len(train), len(test), train.channels, train.flip) == (797, 1000, 1, False)


def test_other_pixels_or_labels_have_another_fingerprint(pixels: torch.Tensor, tmp_path: Path) -> None:
    labels = torch.arange(COUNT) % 3
    other = pixels.clone()
    other[3, 1, 2, 2] ^= 1
    prints = {from_tensors(*pair, 3).fingerprint for pair in ((pixels, labels), (other, labels), (pixels, 2 - labels))}
    assert len(prints) == 3
    folder = save_folder(tmp_path / "images", pixels)
    assert read(str(folder)).fingerprint != read(str(folder), size=(6, 6)).fingerprint
    assert read(str(folder)).fingerprint == read(str(folder), classes=("a", "b", "c")).fingerprint
    assert read(str(folder)).fingerprint != read(str(folder), classes=("b", "a", "c")).fingerprint


def test_labels_of_a_list_are_part_of_the_fingerprint(pixels: torch.Tensor, tmp_path: Path) -> None:
    folder = save_folder(tmp_path, pixels)
    prints = []
    for labels in ((0, 1), (1, 0), (0, 1)):
        (folder / "image_list.txt").write_text(
            "".join(f"a/0{3 * row}.png {label}\n" for row, label in enumerate(labels))
        )
        prints.append(read(str(folder)).fingerprint)
    assert prints[0] == prints[2] != prints[1]
    assert len({read(str(folder), classes=names).fingerprint for names in (("a", "b"), ("b", "a"))}) == 2


@pytest.mark.parametrize("hashed", [True, False])
def test_changed_files_of_the_same_size_have_another_fingerprint(
    hashed: bool, pixels: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    path = tmp_path / "a/0.bmp"
    if not hashed:
        monkeypatch.setattr(image_files, "HASHED_BYTES", 100)
    found = []
    for image in pixels[:2]:
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
        if hashed:
            os.utime(path, ns=(0, 0))
        found.append((path.stat().st_size, read(str(tmp_path)).fingerprint))
    assert found[0][0] == found[1][0]
    assert found[0][1] != found[1][1]
    os.utime(path, ns=(5, 5))
    assert (read(str(tmp_path)).fingerprint == found[1][1]) is hashed  # contents alone count where they are hashed


def test_mistakes_are_named(tmp_path: Path, pixels: torch.Tensor) -> None:
    with pytest.raises(FileNotFoundError, match="no folder"):
        read(str(tmp_path / "nowhere"))
    arrays = save_arrays(tmp_path / "arrays", pixels)
    with pytest.raises(ValueError, match=r"labels must be in 0..1; got 0..2"):
        read(str(arrays), classes=("a", "b"))
    np.save(arrays / "train_labels.npy", np.zeros(5, dtype=np.int64))
    with pytest.raises(ValueError, match="expected 12 integers"):
        read(str(arrays))
    np.save(arrays / "train_images.npy", np.zeros((5, 8, 8, 3)))
    with pytest.raises(ValueError, match=r"train_images.npy has float64 .* expected uint8"):
        read(str(arrays))
    (arrays / "train_images.npy").write_bytes(b"\x93NUMPY no array")
    with pytest.raises(ValueError, match=r"train_images.npy is not a readable array"):
        read(str(arrays))
    np.save(arrays / "train_images.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(ValueError, match="not a readable array"):
        read(str(arrays))

    folder = save_folder(tmp_path / "images", pixels)
    with pytest.raises(ValueError, match="no class of the model: c"):
        read(str(folder), classes=("a", "b"))
    (folder / "a/99.png").write_text("no image")
    with pytest.raises(ValueError, match=r"a/99.png cannot be read .*: remove it"):
        read(str(folder)).in_memory()
    Image.new("RGB", (9, 9)).save(folder / "a/99.png")
    with pytest.raises(ValueError, match=r"a/99.png is 9 x 9, the first image 8 x 8: give the size .*--size"):
        read(str(folder)).in_memory()
    assert len(read(str(folder), size=(8, 8))) == COUNT + 1
    (folder / "a/99.png").rename(folder / "99.png")
    with pytest.raises(ValueError, match="in no class subfolder"):
        read(str(folder)).in_memory()


def test_class_folders_without_an_image_are_named(tmp_path: Path, pixels: torch.Tensor) -> None:
    folder = save_folder(tmp_path / "images", pixels)
    (folder / "empty").mkdir()
    (folder / ".hidden").mkdir()
    with pytest.raises(ValueError, match="no image is read from empty: remove empty folders"):
        read(str(folder))
    assert len(read(str(folder), classes=("a", "b", "c", "empty"))) == COUNT
    (folder / "empty").rmdir()
    (folder / "linked").symlink_to(folder / "a")
    with pytest.raises(ValueError, match="no image is read from linked"):
        read(str(folder))


def test_a_list_may_have_a_mark_and_empty_lines_and_nothing_else_is_read_as_one(
    tmp_path: Path, pixels: torch.Tensor
) -> None:
    folder = save_folder(tmp_path / "images", pixels)
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*.png"))]
    (folder / "image_list.txt").write_text("\ufeff" + "\n\n".join(f"{name} 1" for name in names) + "\n\n")
    assert read(str(folder)).labels.tolist() == [1] * COUNT
    for content in (b"ustar\0" + bytes(5000), b"x" * 5000):
        (folder / "image_list.txt").write_bytes(content)
        with pytest.raises(ValueError, match=r"image_list.txt"):
            read(str(folder))
