"""The state folder: files that are whole or not there, numbers given once, and states that are not mixed up."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ttac.common.files import DiskError
from ttac.serving.state_folder import StateFolder


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    return StateFolder(tmp_path / "state")


def weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shared = torch.rand(3, 4, generator=generator)
    return {"a.weight": shared, "b.weight": shared, "t": shared.T, "half": shared.bfloat16(), "n": torch.tensor(seed)}


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """Let writes beyond `size` bytes of a file fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def files(folder: StateFolder) -> list[str]:
    return sorted(str(path.relative_to(folder.path)) for path in folder.path.rglob("*") if path.is_file())


def test_versions_come_back_bit_for_bit(folder: StateFolder) -> None:
    assert (folder.versions(), folder.newest(), folder.last_number()) == ([], 0, 0)
    for version in (1, 2, 12):
        folder.save_version(version, weights(version))
    assert folder.versions() == [1, 2, 12]
    assert folder.newest() == 12
    assert "versions/00000012.safetensors" in files(folder)
    for version in (1, 2, 12):
        found, expected = folder.load_version(version), weights(version)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor)
    assert folder.published(12) == pytest.approx((folder.path / "versions/00000012.safetensors").stat().st_mtime)
    assert folder.published(13) is None


def test_a_version_never_changes(folder: StateFolder) -> None:
    folder.save_version(3, weights(1))
    with pytest.raises(FileExistsError, match="a version never changes"):
        folder.save_version(3, weights(2))
    assert torch.equal(folder.load_version(3)["n"], torch.tensor(1))


def test_versions_that_are_not_there_or_damaged_say_so(folder: StateFolder) -> None:
    folder.save_version(4, weights(4))
    with pytest.raises(FileNotFoundError, match=r"no version 5 .* there is 4"):
        folder.load_version(5)
    path = folder.path / "versions" / "00000004.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"00000004.safetensors is damaged"):
        folder.load_version(4)
    folder.set_version_aside(4)
    assert folder.versions() == []
    assert folder.last_number() == 4, "the number of a damaged version must not come again"


def test_old_versions_are_deleted_but_for_those_to_spare(folder: StateFolder) -> None:
    for version in range(1, 8):
        folder.save_version(version, weights(version))
    folder.prune(3, {2})
    assert folder.versions() == [2, 5, 6, 7]
    folder.prune(1, set())
    assert folder.versions() == [7]


def test_snapshots_come_back_and_replace_each_other(folder: StateFolder) -> None:
    assert folder.load_snapshot() is None
    for number in range(2):
        folder.save_snapshot({"position": number, "adapter": {"queue": torch.full((3,), number)}, "guard": None})
    found = folder.load_snapshot()
    assert found is not None
    assert (found["position"], found["guard"]) == (1, None)
    assert torch.equal(found["adapter"]["queue"], torch.ones(3, dtype=torch.int64))
    assert files(folder) == ["snapshot.pt"]


class Attack:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("owned",)


@pytest.mark.parametrize("damage", ["torn", "empty", "text", "no mapping", "code"])
def test_a_damaged_snapshot_is_said_to_be_and_can_be_put_aside(
    folder: StateFolder, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder.save_snapshot({"queue": torch.rand(100)})
    content = folder.snapshot.read_bytes()
    if damage == "no mapping":
        torch.save([1, 2], folder.snapshot)
    elif damage == "code":
        torch.save({"queue": Attack()}, folder.snapshot)
    else:
        folder.snapshot.write_bytes({"torn": content[: len(content) // 2], "empty": b"", "text": b"hello"}[damage])
    with pytest.raises(ValueError, match=r"snapshot\.pt is damaged"):
        folder.load_snapshot()
    assert not (tmp_path / "owned").exists()
    damaged = folder.snapshot.read_bytes()
    assert folder.set_snapshot_aside() == "was put aside as snapshot.damaged.pt"
    assert folder.load_snapshot() is None
    assert files(folder) == ["snapshot.damaged.pt"]
    folder.snapshot.write_bytes(b"damaged too")
    assert "there is a snapshot.damaged.pt already" in folder.set_snapshot_aside()
    assert (folder.path / "snapshot.damaged.pt").read_bytes() == damaged
    assert folder.load_snapshot() is None


ALLOCATOR = "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError(ALLOCATOR)]
)
def test_a_snapshot_that_the_memory_is_too_small_for_is_not_damaged(
    folder: StateFolder, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise error

    folder.save_snapshot({"queue": torch.rand(100)})
    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(type(error)) as raised:
        folder.load_snapshot()
    assert raised.value is error


def test_a_snapshot_that_the_disk_does_not_give_is_not_damaged(folder: StateFolder) -> None:
    folder.snapshot.mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        folder.load_snapshot()


def test_a_full_disk_leaves_what_was_there_and_nothing_half_written(folder: StateFolder) -> None:
    folder.save_snapshot({"old": 1})
    folder.save_version(1, {"small": torch.zeros(1)})
    before = files(folder)
    big = torch.zeros(100_000)
    with files_limited_to(20_000):
        with pytest.raises(OSError, match="larger than files may be"):
            folder.save_version(2, {"big": big})
        with pytest.raises(DiskError, match=r"snapshot.pt cannot be written, it is larger than files may be here"):
            folder.save_snapshot({"big": big})
    assert files(folder) == before
    assert folder.load_snapshot() == {"old": 1}


def test_a_folder_is_of_one_model_and_method(folder: StateFolder) -> None:
    mine = {"model": "abc", "method": "tent", "options": {"lr": 0.1}}
    folder.check(mine)
    assert not folder.path.exists(), "a check writes nothing"
    folder.claim(mine)
    folder.claim(mine)
    folder.check({"model": "abc"})
    with pytest.raises(ValueError, match=r"method: tent there, bn now\): choose another --state, or delete it"):
        folder.claim({**mine, "method": "bn"})
    assert json.loads((folder.path / "identity.json").read_text()) == mine
    (folder.path / "identity.json").write_text("{")
    with pytest.raises(ValueError, match=r"identity\.json is damaged: choose another --state"):
        folder.check(mine)


def test_what_killed_processes_left_is_removed(folder: StateFolder) -> None:
    folder.save_version(1, weights(1))
    folder.save_snapshot({"position": 1})
    for draft in (".snapshot.pt.123.part", "versions/.00000002.safetensors.123.part"):
        (folder.path / draft).write_bytes(b"half")
    folder.claim({})
    assert files(folder) == ["identity.json", "snapshot.pt", "versions/00000001.safetensors"]
    assert folder.last_number() == 1


def test_other_files_among_the_versions_are_no_versions(folder: StateFolder) -> None:
    folder.save_version(1, weights(1))
    for name in ("notes.txt", ".00000009.safetensors.5.part", "best.safetensors", "٣.safetensors"):
        (folder.path / "versions" / name).write_bytes(b"")
    assert (folder.versions(), folder.last_number()) == ([1], 1)
