"""Folders of images: order, sizes, labels, and files that are not what their name says."""

from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ttac.data import folder as folder_module
from ttac.data.folder import FolderStream, image_size, labels_by_subfolder, list_images, read_image


def photograph(height: int, width: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def fill(folder: Path, names: Sequence[str], height: int = 8, width: int = 8) -> None:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        photograph(height, width, number).save(folder / name)


def bomb(width: int, height: int) -> bytes:
    """A small PNG file that says it is `width x height`."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = b""
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")):
        chunks += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return b"\x89PNG\r\n\x1a\n" + chunks


def test_images_are_listed_by_name_whatever_the_case_of_the_suffix(tmp_path: Path) -> None:
    fill(tmp_path, ["b.JPG", "a/z.png", "a.bmp", "c.webp", "B.tiff", "d.ppm"])
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "folder.png").mkdir()
    assert list_images(tmp_path) == ["B.tiff", "a.bmp", "a/z.png", "b.JPG", "c.webp", "d.ppm"]


def test_links_that_lead_out_are_left_out(tmp_path: Path) -> None:
    fill(tmp_path, ["outside/secret.png", "inside/a.png"])
    inside = tmp_path / "inside"
    (inside / "escape.png").symlink_to(tmp_path / "outside/secret.png")
    (inside / "up.png").symlink_to("../outside/secret.png")
    (inside / "folder").symlink_to(tmp_path / "outside")
    (inside / "dangling.png").symlink_to("nowhere.png")
    (inside / "same.png").symlink_to("a.png")
    assert list_images(inside) == ["a.png", "dangling.png", "same.png"]
    assert list_images(inside, broken_links=False) == ["a.png", "same.png"]
    for name in ("a.png", "same.png", "dangling.png"):
        (inside / name).unlink()
    (inside / "nowhere.png").symlink_to(tmp_path / "outside/nothing.png")
    with pytest.raises(ValueError, match="3 links lead out of it"):
        list_images(inside)


def test_links_in_circles_and_to_nothing_are_files_that_are_skipped(tmp_path: Path) -> None:
    fill(tmp_path, ["a.png", "z.png"])
    links = {"self.png": "self.png", "one.png": "two.png", "two.png": "one.png", "gone.png": "nowhere.png"}
    links |= {"folder.png": ".", "around": "."}
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    reported: dict[str, str] = {}
    files = list_images(tmp_path)
    stream = FolderStream(tmp_path, files, 2, None, 3, unreadable=reported.__setitem__)
    assert [name for _, batch in stream for name in batch] == ["a.png", "z.png"]
    circle = os.strerror(errno.ELOOP)
    assert reported == {
        "gone.png": os.strerror(errno.ENOENT), "one.png": circle, "self.png": circle, "two.png": circle
    }  # fmt: skip
    assert list_images(tmp_path, broken_links=False) == ["a.png", "z.png"]
    with pytest.raises(ValueError, match=r"none of 1 images can be read; self.png"):
        image_size(tmp_path, ["self.png"])


def test_missing_and_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder"):
        list_images(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no image in"):
        list_images(tmp_path)


@pytest.mark.parametrize(("height", "width"), [(40, 60), (61, 37), (32, 32), (20, 25), (33, 100), (36, 36)])
@pytest.mark.parametrize("crop_pct", [1.0, 0.875])
def test_resizing_equals_torchvision(height: int, width: int, crop_pct: float, tmp_path: Path) -> None:
    transforms = pytest.importorskip("torchvision").transforms
    image = photograph(height, width)
    image.save(tmp_path / "a.png")
    reference = transforms.Compose(
        [
            transforms.Resize(int(32 / crop_pct), transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(32),
            transforms.PILToTensor(),
        ]
    )(image)
    assert torch.equal(read_image(tmp_path / "a.png", (32, 32), 3, crop_pct), reference.float() / 255)


def test_oblong_sizes_are_covered(tmp_path: Path) -> None:
    photograph(50, 30).save(tmp_path / "a.png")
    assert read_image(tmp_path / "a.png", (16, 40), 3, 0.9).shape == (3, 16, 40)
    assert read_image(tmp_path / "a.png", (40, 16), 1).shape == (1, 40, 16)


def test_all_kinds_of_pixels_become_colours_or_greys(tmp_path: Path) -> None:
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK"):
        name = f"{mode}.tiff" if mode == "CMYK" else f"{mode}.png"
        photograph(6, 5).convert(mode).save(tmp_path / name)
        for channels in (1, 3):
            pixels = read_image(tmp_path / name, None, channels)
            assert pixels.shape == (channels, 6, 5)
            assert pixels.dtype == torch.float32
            assert pixels.max() > 0.5


def test_sixteen_bits_are_scaled_and_not_cut_off(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, 257, 32896, 65535]], dtype=np.uint16)).save(tmp_path / "a.png")
    assert torch.equal(read_image(tmp_path / "a.png", None, 1)[0, 0] * 255, torch.tensor([0.0, 1, 128, 255]))


def unreadable_files(folder: Path) -> dict[str, str]:
    """Write files that are no usable images; gives a part of the reason for each."""
    photograph(8, 8).save(folder / "whole.png")
    whole = (folder / "whole.png").read_bytes()
    (folder / "whole.png").unlink()
    (folder / "empty.png").write_bytes(b"")
    (folder / "text.jpg").write_text("no image")
    (folder / "truncated.png").write_bytes(whole[: len(whole) // 2])
    (folder / "bomb.png").write_bytes(bomb(60_000, 60_000))
    (folder / "large.png").write_bytes(bomb(9_000, 9_000))
    (folder / "elongated.png").write_bytes(bomb(60_000_000, 1))
    (folder / "vector.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n")
    Image.fromarray(np.full((8, 8), 0.5, dtype=np.float32)).save(folder / "floats.tiff")
    return {
        "empty.png": "not an image",
        "text.jpg": "not an image",
        "truncated.png": "OSError",
        "bomb.png": "DecompressionBomb",
        "large.png": "pixels are more than",
        "elongated.png": "",
        "vector.png": "not an image",
        "floats.tiff": "floating-point",
    }


def test_unreadable_files_are_reported_and_skipped(tmp_path: Path) -> None:
    fill(tmp_path, ["a.png", "m.png", "z.png"])
    expected = unreadable_files(tmp_path)
    reported: dict[str, str] = {}
    files = list_images(tmp_path)
    stream = FolderStream(tmp_path, files, 4, (8, 8), 3, unreadable=reported.__setitem__)
    names = [name for _, batch in stream for name in batch]
    assert names == ["a.png", "m.png", "z.png"]
    assert reported.keys() == expected.keys()
    for name, part in expected.items():
        assert part in reported[name], (name, reported[name])


def test_an_elongated_image_is_not_blown_up() -> None:
    with pytest.raises(folder_module.UnreadableImageError, match="too elongated"):
        folder_module.image_pixels(photograph(1, 5_000), (32, 32), 3, max_pixels=10_000)


def test_greys_of_sixteen_bits_are_rounded_to_eight() -> None:
    levels = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    pixels = folder_module.image_pixels(Image.fromarray(levels), None, 1)
    assert torch.equal(pixels[0], torch.from_numpy((levels / 257).round()).float() / 255)


def test_batches_are_cut_by_place_so_that_going_on_gives_the_same(tmp_path: Path) -> None:
    fill(tmp_path, [f"{number}.png" for number in range(8)])
    for broken in ("1.png", "3.png", "4.png", "5.png"):
        (tmp_path / broken).write_text("no image")
    files = list_images(tmp_path)
    whole = FolderStream(tmp_path, files, 3, None, 3)
    batches = [(whole.next_batch, names, images) for images, names in whole]
    assert [(position, names) for position, names, _ in batches] == [
        (2, ["0.png", "2.png"]),  # 3, 4 and 5 have been tried
        (3, ["6.png", "7.png"]),
    ]
    for place in (1, 2):
        rest = list(FolderStream(tmp_path, files, 3, None, 3, next_batch=place))
        assert [names for _, names in rest] == [["6.png", "7.png"]]
        assert torch.equal(rest[0][0], batches[1][2])


@pytest.mark.parametrize("broken", [(), ("6.png", "7.png"), ("3.png", "4.png", "5.png", "7.png"), ("0.png", "1.png")])
def test_the_last_batch_is_known_wherever_files_cannot_be_read(broken: tuple[str, ...], tmp_path: Path) -> None:
    fill(tmp_path, [f"{number}.png" for number in range(8)])
    for name in broken:
        (tmp_path / name).write_text("no image")
    reported: list[str] = []
    stream = FolderStream(tmp_path, list_images(tmp_path), 2, None, 3, 1.0, lambda name, _: reported.append(name))
    batches = [(names, stream.is_last) for _, names in stream]
    assert [name for names, _ in batches for name in names] == [
        f"{n}.png" for n in range(8) if f"{n}.png" not in broken
    ]
    assert [is_last for _, is_last in batches] == [False] * (len(batches) - 1) + [True]
    assert (reported, stream.next_batch) == (list(broken), 4)


def test_without_a_size_all_images_must_have_that_of_the_first(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_text("no image")
    fill(tmp_path, ["a.png", "b.png"], 8, 6)
    fill(tmp_path, ["c.png"], 8, 7)
    files = list_images(tmp_path)
    assert image_size(tmp_path, files) == (8, 6)
    with pytest.raises(ValueError, match=r"c.png is 8 x 7, the first image 8 x 6: .*--size"):
        list(FolderStream(tmp_path, files, 2, None, 3))
    assert sum(len(names) for _, names in FolderStream(tmp_path, files, 2, (4, 4), 3)) == 3
    with pytest.raises(ValueError, match=r"none of 1 images can be read; 0.png"):
        image_size(tmp_path, ["0.png"])


@pytest.mark.parametrize(("batch", "channels", "message"), [(0, 3, "batch must be"), (1, 4, "takes 4 channels")])
def test_streams_that_make_no_sense(batch: int, channels: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        FolderStream(tmp_path, [], batch, None, channels)


def test_labels_follow_the_class_names_where_there_are_any() -> None:
    files = ["cat/1.png", "cat/deep/2.png", "ant/3.png"]
    assert list(labels_by_subfolder(files, 2, None).values()) == [1, 1, 0]
    assert list(labels_by_subfolder(files, 3, ["cat", "bee", "ant"]).values()) == [0, 0, 2]


@pytest.mark.parametrize(
    ("files", "classes", "message"),
    [
        (["cat/1.png", "2.png"], None, r"1 images are in no class subfolder \(2.png\)"),
        (["cat/1.png"], None, "there are 1 class subfolders, the model has 2 classes"),
        (["cat/1.png", "dog/1.png"], ["cat", "ant"], "no class of the model: dog"),
        (["cat/1.png"], ["cat", "cat"], "two classes of the model have one name"),
    ],
)
def test_subfolders_that_are_no_classes(files: list[str], classes: list[str] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        labels_by_subfolder(files, 2, classes)


def test_hidden_files_and_folders_are_left_out(tmp_path: Path) -> None:
    for name in ("a/1.png", ".ipynb_checkpoints/2.png", "a/._1.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (2, 2)).save(tmp_path / name)
    assert list_images(tmp_path) == ["a/1.png"]
