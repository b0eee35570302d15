"""`ttac data` as a new user meets it: an empty machine, no network, wrong names, a full disk, a file cut in half."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

from data_helpers import read_data
from ttac.cli import UNWRITABLE, main
from ttac.common.resumable import alone_in
from ttac.data.sets import archives, download, fetch
from ttac.data.sets.spec import RemoteFile
from ttac.data.sets.specs import SPECS
from ttac.source.bundle import load_bundle
from web_server import Web, serving

COUNT = 2  # images in a file


def records() -> bytes:
    rng = np.random.default_rng(0)
    return rng.integers(0, 10, (COUNT, 3073), dtype=np.uint8).tobytes()


def archive_of(folder: str) -> bytes:
    """Pack a CIFAR-10 of a few images, binary version."""
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w:gz") as archive:
        for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
            info = tarfile.TarInfo(f"{folder}/{name}.bin")
            info.size = len(records())
            archive.addfile(info, io.BytesIO(records()))
    return body.getvalue()


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Web]:
    """A server with a small CIFAR-10 in the place of the authors', and an empty data folder."""
    monkeypatch.setattr(download, "PAUSE", 0.001)
    monkeypatch.setenv("TTAC_DATA", str(tmp_path / "root"))
    monkeypatch.chdir(tmp_path)
    body = archive_of("cifar-10-batches-bin")
    with serving(small__tar__gz=body) as web:
        file = RemoteFile(
            f"{web.address}/small.tar.gz?download=1",
            len(body),
            f"md5:{hashlib.md5(body).hexdigest()}",
            unpacks_to="cifar-10-batches-bin",
            unpacked=50_000,
        )
        other = replace(file, url=f"{web.address}/other.tar.gz", unpacks_to="other", optional=True)
        counts = {"train": 5 * COUNT, "test": COUNT}
        spec = replace(SPECS["cifar10"], files=(file, other), counts=counts, md5={})
        monkeypatch.setitem(SPECS, "cifar10", spec)
        yield web


class Said(NamedTuple):
    code: int
    out: str
    error: str


Run = Callable[..., Said]


@pytest.fixture
def ttac(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> Said:
        code = main(["data", *arguments])
        out, error = capsys.readouterr()
        return Said(code, " ".join(out.split()), error)

    return run


def test_a_data_set_is_fetched_checked_and_read(web: Web, ttac: Run, tmp_path: Path) -> None:
    assert "| no |" in ttac("list").out.replace("│", "|")
    fetched = ttac("fetch", "cifar10")
    place = tmp_path / "root/cifar10/cifar-10-batches-bin"
    assert fetched.code == 0
    assert f"cifar10 in {place}" in fetched.out
    assert "cite: Krizhevsky" in fetched.out
    assert [path.name for path in (tmp_path / "root/cifar10").iterdir()] == ["cifar-10-batches-bin"]
    checked = ttac("check", "cifar10")
    assert checked.code == 0
    assert checked.out.count("ok ") == 6
    assert checked.out.endswith("cifar10 is whole")
    assert len(read_data("cifar10", split="train")) == 5 * COUNT
    asked = len(web.asked)
    assert ttac("fetch", "cifar10").code == 0
    assert len(web.asked) == asked  # nothing to do
    listed = {row["name"]: row for row in json.loads(ttac("list", "--json").out)}
    assert listed["cifar10"]["path"] == str(place)
    assert (listed["cifar100-c"]["path"], listed["cifar100-c"]["bytes"]) == (None, 2_918_473_216)


def test_training_takes_a_data_set_by_its_name(web: Web, ttac: Run, tmp_path: Path) -> None:
    arguments = ["--arch", "resnet20", "--set", "width=4", "--epochs", "1", "--batch", "5", "--out", "bundle"]
    assert main(["train", "--data", "cifar10", *arguments]) == 2
    ttac("fetch", "cifar10")
    assert main(["train", "--data", "cifar10", *arguments]) == 0
    bundle = load_bundle(Path("bundle"))
    assert bundle.description.classes == SPECS["cifar10"].classes
    data = read_data("cifar10", split="train")
    assert bundle.description.mean == pytest.approx(data.pixel_moments()[0])  # of its own images, as ever
    assert bundle.training["settings"]["validation"] == [read_data("cifar10", split="test").fingerprint, COUNT]


def test_what_lies_under_its_usual_name_is_not_fetched_again(web: Web, ttac: Run, tmp_path: Path) -> None:
    ttac("fetch", "cifar10")
    (tmp_path / "root/cifar10/cifar-10-batches-bin").rename(tmp_path / "root/cifar-10-batches-bin")
    asked = len(web.asked)
    assert f"cifar10 in {tmp_path / 'root/cifar-10-batches-bin'}" in ttac("fetch", "cifar10").out
    assert len(web.asked) == asked


def test_the_archive_is_kept_and_files_are_chosen(web: Web, ttac: Run, tmp_path: Path) -> None:
    assert ttac("fetch", "cifar10", "--keep-archive").code == 0
    kept = tmp_path / "root/cifar10/small.tar.gz"
    assert kept.read_bytes() == web.files["small.tar.gz"]
    assert "ok small.tar.gz: md5" in ttac("check", "cifar10").out
    kept.write_bytes(kept.read_bytes()[:-5])
    assert ttac("check", "cifar10").code == 1
    web.files["other.tar.gz"] = web.files["small.tar.gz"]
    assert ttac("fetch", "cifar10", "--only", "other.tar.gz").code == 0
    assert (tmp_path / "root/cifar10/other/cifar-10-batches-bin").is_dir()
    wrong = ttac("fetch", "cifar10", "--only", "smal.tar.gz")
    assert wrong.code == 2
    assert "unknown file of cifar10: 'smal.tar.gz'; did you mean small.tar.gz" in wrong.error


def test_without_network_the_steps_by_hand_are_told_and_work(web: Web, ttac: Run, tmp_path: Path) -> None:
    body = web.files.pop("small.tar.gz")
    failed = ttac("fetch", "cifar10")
    folder = tmp_path / "root/cifar10"
    assert failed.code == 2
    for part in (
        "small.tar.gz was not fetched",
        f"download {web.address}/small.tar.gz?download=1 (",
        f"put what was downloaded into {folder}",
        f"ttac data fetch cifar10 --root {tmp_path / 'root'}",
        f"ttac data check cifar10 --root {tmp_path / 'root'}",
        "--mirror",
    ):
        assert part in failed.error
    (folder / "small.tar.gz").write_bytes(body[: len(body) // 2])
    assert "delete it, and it is fetched again" in ttac("fetch", "cifar10").error
    (folder / "small.tar.gz").write_bytes(body)
    assert ttac("fetch", "cifar10").code == 0
    assert ttac("check", "cifar10", "--root", str(tmp_path / "root")).code == 0


def test_the_steps_by_hand_can_be_pasted(web: Web, ttac: Run, tmp_path: Path) -> None:
    web.files.clear()
    one, two = SPECS["cifar10"].files
    SPECS["cifar10"] = replace(SPECS["cifar10"], files=(one, replace(two, optional=False)))
    error = ttac("fetch", "cifar10", "--root", str(tmp_path / "my data")).error
    assert error.count("  download http") == 2
    assert f"ttac data fetch cifar10 --root '{tmp_path / 'my data'}'    checks and unpacks it" in error
    (tmp_path / "my data/cifar10/other").mkdir()  # unpacked already
    assert ttac("fetch", "cifar10", "--root", str(tmp_path / "my data")).error.count("  download http") == 1


def test_what_is_not_whole_is_not_said_to_be_in(web: Web, ttac: Run, tmp_path: Path) -> None:
    ttac("fetch", "cifar10")
    place = tmp_path / "root/cifar10/cifar-10-batches-bin"
    (place / "data_batch_3.bin").unlink()
    (place / "data_batch_2.bin").write_bytes(records()[:3073])
    again = ttac("fetch", "cifar10")
    assert again.code == 1
    assert "missing data_batch_3.bin" in again.out
    assert f"cifar10 is not whole: 2 of 6 parts are missing or damaged: delete {place} and fetch again" in again.out
    assert ttac("check", "cifar10").out.endswith(f"delete {place} and fetch again")
    for path in place.iterdir():
        path.unlink()
    empty = ttac("fetch", "cifar10")
    assert (empty.code, "delete it and fetch again" in empty.error) == (2, True)
    place.rmdir()
    assert ttac("fetch", "cifar10").code == 0


def test_no_more_than_need_be_is_to_be_deleted(ttac: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTAC_DATA", str(tmp_path))
    monkeypatch.setitem(SPECS, "visda-c", replace(SPECS["visda-c"], counts={"train": 1, "validation": 1, "test": 1}))
    for split in ("train", "validation"):
        (tmp_path / "visda-c" / split / "bus").mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "visda-c" / split / "bus/a.png")
    (tmp_path / "visda-c/validation/bus/a.png").write_bytes(b"")
    assert ttac("check", "visda-c").out.endswith(f": delete {tmp_path / 'visda-c/validation'} and fetch again")
    Image.new("RGB", (8, 8)).save(tmp_path / "visda-c/validation/bus/a.png")
    (tmp_path / "visda-c/test/trunk00").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "visda-c/test/trunk00/a.png")
    assert "damaged: The labels of test.tar are apart: put" in ttac("check", "visda-c").out
    assert "put https" in ttac("fetch", "visda-c").out
    shutil.rmtree(tmp_path / "visda-c/validation")
    assert ttac("check", "visda-c").out.endswith("or damaged: fetch again")
    elsewhere = ttac("check", f"visda-c={tmp_path / 'visda-c'}", "--root", str(tmp_path / "other"))
    assert "fetch again" not in elsewhere.out


def test_mirrors_come_first(web: Web, ttac: Run, tmp_path: Path) -> None:
    mirrors = ("--mirror", f"{web.address}/gone", "--mirror", f"{web.address}/mirror/")
    web.errors = [404]
    assert ttac("fetch", "cifar10", *mirrors).code == 0
    assert [path for path, _ in web.asked] == ["/gone/small.tar.gz", "/mirror/small.tar.gz"]
    assert "--mirror wants an address with http" in ttac("fetch", "cifar10", "--mirror", str(tmp_path)).error


def test_an_archive_of_another_kind_leaves_nothing(web: Web, ttac: Run, tmp_path: Path) -> None:
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("../../escaped"))
    web.files["small.tar.gz"] = body.getvalue()
    file = replace(SPECS["cifar10"].files[0], size=None, checksum=None)
    SPECS["cifar10"] = replace(SPECS["cifar10"], files=(file,))
    failed = ttac("fetch", "cifar10")
    assert (failed.code, "not to be trusted" in failed.error) == (2, True)
    assert [path.name for path in (tmp_path / "root/cifar10").iterdir()] == ["small.tar.gz"]
    assert ttac("check", "cifar10").code == 1


def test_a_disk_without_space_is_told_before_anything_is_begun(
    web: Web, ttac: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**14))
    failed = ttac("fetch", "cifar10")
    assert failed.code == UNWRITABLE
    assert "cifar10 needs 0.1 MiB more, and 0.0 MiB are free: make space, or take another folder" in failed.error
    assert not web.asked
    # The first file has its space, both together do not.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**18))
    one, two = SPECS["cifar10"].files
    SPECS["cifar10"] = replace(SPECS["cifar10"], files=(one, replace(two, optional=False, unpacked=2**18)))
    assert ttac("fetch", "cifar10").code == UNWRITABLE
    assert not web.asked


def test_a_disk_that_fills_while_unpacking_keeps_the_archive(
    web: Web, ttac: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archives, "_extract", full)
    failed = ttac("fetch", "cifar10")
    assert failed.code == UNWRITABLE
    assert "the disk is full" in failed.error
    assert [path.name for path in (tmp_path / "root/cifar10").iterdir()] == ["small.tar.gz"]


def test_an_interruption_says_how_to_go_on(
    web: Web, ttac: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch, "download", interrupt)
    stopped = ttac("fetch", "cifar10")
    assert (stopped.code, stopped.error) == (130, "interrupted; the same command goes on from there\n")


def test_one_process_fetches_at_a_time(web: Web, ttac: Run, tmp_path: Path) -> None:
    with alone_in(tmp_path / "root/cifar10"):
        assert "another process is writing to" in ttac("fetch", "cifar10").error


def test_a_check_names_what_is_missing_or_damaged(web: Web, ttac: Run, tmp_path: Path) -> None:
    missing = ttac("check", "cifar10")
    assert missing.code == 1
    assert "missing: cifar10 is not in" in missing.error
    ttac("fetch", "cifar10")
    folder = tmp_path / "root/cifar10/cifar-10-batches-bin"
    (folder / "data_batch_1.bin").unlink()
    (folder / "data_batch_2.bin").write_bytes(records()[:3073])
    checked = ttac("check", f"cifar10={folder}")
    assert checked.code == 1
    assert "missing data_batch_1.bin" in checked.out
    assert "damaged data_batch_2.bin" in checked.out
    assert "cifar10 is not whole: 2 of 6 parts are missing or damaged" in checked.out


def test_published_sums_of_unpacked_files_are_compared(web: Web, ttac: Run, tmp_path: Path) -> None:
    ttac("fetch", "cifar10")
    sums = {"data_batch_1.bin": hashlib.md5(records()).hexdigest(), "test_batch.bin": "0" * 32}
    SPECS["cifar10"] = replace(SPECS["cifar10"], md5=sums)
    checked = ttac("check", "cifar10")
    assert "ok data_batch_1.bin: 2 images, labels, md5" in checked.out
    assert f"test_batch.bin has md5:{hashlib.md5(records()).hexdigest()}, expected md5:{'0' * 32}" in checked.out


def test_arrays_are_checked_at_all_severities(ttac: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    domains = {"domains": ("fog", "snow"), "extra_domains": ("spatter",)}
    monkeypatch.setitem(SPECS, "cifar10-c", replace(SPECS["cifar10-c"], counts={"test": 2}, **domains))
    labels = np.zeros(10, np.uint8)
    np.save(tmp_path / "labels.npy", labels)
    np.save(tmp_path / "fog.npy", np.zeros((10, 32, 32, 3), np.uint8))
    checked = ttac("check", f"cifar10-c={tmp_path}")
    assert "ok fog: 2 + 2 + 2 + 2 + 2 images" in checked.out
    assert "missing snow: no snow.npy" in checked.out
    assert "not needed spatter: no spatter.npy" in checked.out
    assert "1 of 3 parts" in checked.out
    np.save(tmp_path / "snow.npy", np.zeros((10, 32, 32, 3), np.uint8))
    labels[7] = 10  # at the fourth severity
    np.save(tmp_path / "labels.npy", labels)
    assert "damaged snow" in ttac("check", f"cifar10-c={tmp_path}").out


def test_images_that_are_cut_off_are_found(ttac: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(SPECS["imagenet-c"], counts={"test": 4}, num_classes=2, domains=("fog",), extra_domains=())
    monkeypatch.setitem(SPECS, "imagenet-c", spec)
    for severity in range(1, 6):
        for number in range(4):
            place = tmp_path / f"fog/{severity}/n{number % 2}"
            place.mkdir(parents=True, exist_ok=True)
            image = Image.fromarray(np.random.default_rng(number).integers(0, 256, (64, 64, 3), dtype=np.uint8))
            image.save(place / f"{number}.JPEG")
    name = f"imagenet-c={tmp_path}"
    whole = ttac("check", name)
    assert (whole.code, whole.out.count("4 images of 2 classes")) == (0, 5)
    cut = tmp_path / "fog/3/n1/3.JPEG"
    cut.write_bytes(cut.read_bytes()[:-1000])
    (tmp_path / "fog/4/n0/0.JPEG").write_bytes(b"")
    (tmp_path / "fog/5/n0/0.JPEG").unlink()
    checked = ttac("check", name)
    assert "damaged fog/3: 1 of 4 images cannot be read (n1/3.JPEG" in checked.out
    assert "damaged fog/4: 1 of 4 images cannot be read (n0/0.JPEG" in checked.out
    assert "damaged fog/5" in checked.out
    assert "has 3 images, imagenet-c has 4" in checked.out
    assert "3 of 5 parts" in checked.out


def test_splits_in_folders_are_checked(ttac: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(SPECS["visda-c"], counts={"train": 1, "validation": 1, "test": 1})
    monkeypatch.setitem(SPECS, "visda-c", spec)
    for split in ("train", "validation"):
        (tmp_path / split / "bus").mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / split / "bus/a.png")
    checked = ttac("check", f"visda-c={tmp_path}")
    assert checked.code == 0
    assert "not needed test: no folder" in checked.out
    assert ttac("check", f"visda-c={tmp_path / 'train'}").code == 0  # a part alone, by its path
    (tmp_path / "validation/image_list.txt").write_text("bus/a.png 12\n")
    assert "label 12 is not in 0..11" in ttac("check", f"visda-c={tmp_path}").out


def test_mistakes_are_answered(ttac: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTAC_DATA", str(tmp_path))
    assert "did you mean cifar10" in ttac("fetch", "cifar").error
    assert "did you mean visda-c" in ttac("check", "visda").error
    assert f"say which data set {tmp_path} is to be: NAME={tmp_path}" in ttac("check", str(tmp_path)).error
    by_hand = ttac("fetch", "imagenet")
    assert by_hand.code == 2
    assert f"{tmp_path}/imagenet/train/<wnid>" in by_hand.error
    assert "pip install 'ttac[demo]'" in ttac("fetch", "digits").error
    assert ttac("check", "cifar10-jpg").code == 1
    pytest.importorskip("sklearn")
    assert ttac("check", "digits").out.endswith("digits is whole")
