"""The state folder: published versions, the snapshot that a stream goes on from, and whose they are."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from ttac.common.files import to_disk, write_json, write_pickle
from ttac.common.resumable import differing_settings
from ttac.model.tensors import write_tensors

VERSIONS, SUFFIX = "versions", ".safetensors"
SNAPSHOT, IDENTITY, EVENTS = "snapshot.pt", "identity.json", "events.jsonl"
DAMAGED = ".damaged"


class StateFolder:
    """Files of one served model, each of them whole or not there; one process writes at a time.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as path:
    ...     folder = StateFolder(Path(path))
    ...     folder.save_version(1, {"weight": torch.ones(2)})
    ...     folder.newest(), folder.load_version(1)
    (1, {'weight': tensor([1., 1.])})
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events = path / EVENTS
        self.snapshot = path / SNAPSHOT
        self._versions = path / VERSIONS

    # Whose state it is

    def check(self, identity: Mapping[str, Any]) -> None:
        """Raise an error where the folder holds the state of a model or a method with another identity."""
        path = self.path / IDENTITY
        if not path.exists():
            return
        try:
            there = dict(json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is damaged: choose another --state, or delete it") from error
        differing = differing_settings(there, identity)
        if differing:
            raise ValueError(
                f"{self.path} holds the state of another model or method ({differing}): choose another --state, or "
                "delete it"
            )

    def claim(self, identity: Mapping[str, Any]) -> None:
        """Make the folder one of this identity, or raise an error where it is of another; remove what kills left."""
        self.check(identity)
        if not (self.path / IDENTITY).exists():
            write_json(self.path / IDENTITY, dict(identity))
        for draft in (*self.path.glob(".*.part"), *self._versions.glob(".*.part")):
            draft.unlink(missing_ok=True)

    # Versions

    def versions(self) -> list[int]:
        """List the versions that are there, oldest first."""
        return sorted(_numbers(self._versions, SUFFIX))

    def newest(self) -> int:
        """Give the newest version, 0 where there is none."""
        return max(self.versions(), default=0)

    def last_number(self) -> int:
        """Give the greatest number that a version has had, also one that was damaged; 0 where there is none."""
        return max(_numbers(self._versions), default=0)

    def save_version(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Write a version's weights; a number that is taken is refused, as it names other weights."""
        path = self._path(version)
        if path.exists():
            raise FileExistsError(f"there is a version {version} already, and a version never changes: {path}")
        write_tensors(path, weights)
        to_disk(self._versions)  # a number that was seen must not come again after a power cut

    def load_version(self, version: int) -> dict[str, Tensor]:
        """Read a version's weights; raises a FileNotFoundError or a ValueError that says what is wrong with it."""
        path = self._path(version)
        try:
            return safetensors.torch.load(path.read_bytes())
        except FileNotFoundError as error:
            there = ", ".join(map(str, self.versions())) or "none"
            raise FileNotFoundError(f"there is no version {version} in {self.path}; there is {there}") from error
        except safetensors.SafetensorError as error:
            raise ValueError(f"{path} is damaged: {error}") from error

    def published(self, version: int) -> float | None:
        """Tell when a version was written, None where it is not there or cannot be looked at."""
        try:
            return self._path(version).stat().st_mtime
        except OSError:
            return None

    def set_version_aside(self, version: int) -> None:
        """Keep a damaged version out of the way, and its number from being given again."""
        with contextlib.suppress(OSError):
            self._path(version).replace(self._path(version).with_suffix(DAMAGED))

    def prune(self, keep: int, spare: Collection[int]) -> None:
        """Delete all but the newest `keep` versions and those to `spare`."""
        for version in self.versions()[:-keep]:
            if version not in spare:
                self._path(version).unlink(missing_ok=True)

    def _path(self, version: int) -> Path:
        return self._versions / f"{version:08d}{SUFFIX}"

    # The snapshot

    def save_snapshot(self, content: dict[str, Any]) -> None:
        """Replace the snapshot by plain tensors, numbers and text."""
        write_pickle(self.snapshot, content)

    def load_snapshot(self) -> dict[str, Any] | None:
        """Read the snapshot, None where there is none; raises a ValueError where it is damaged.

        A disk that cannot be read and a memory that is too small are no damage, and raise what they raise.
        """
        try:
            # Read apart, because torch says of a torn file what Python says of a disk.
            content = io.BytesIO(self.snapshot.read_bytes())
        except FileNotFoundError:
            return None
        # Each tensor comes back to the device it was on, if that is there.
        anywhere = None if torch.cuda.is_available() else "cpu"
        try:
            return dict(torch.load(content, map_location=anywhere, weights_only=True))
        except Exception as error:  # a damaged or forged file fails wherever it likes
            if lacks_memory(error):
                raise
            raise ValueError(f"{self.snapshot} is damaged: {error}") from error

    def set_snapshot_aside(self) -> str:
        """Keep a damaged snapshot out of the way, and say how; the first one is kept, later ones are not."""
        aside = self.snapshot.with_suffix(f"{DAMAGED}{self.snapshot.suffix}")
        try:
            if aside.exists():
                self.snapshot.unlink()
                return f"was deleted, as there is a {aside.name} already"
            self.snapshot.replace(aside)
        except OSError as error:
            return f"is not gone on from, and cannot be moved ({error})"
        return f"was put aside as {aside.name}"


def lacks_memory(error: BaseException | None) -> bool:
    """Tell whether an error, or what caused it, is that memory was short.

    >>> lacks_memory(MemoryError()), lacks_memory(ValueError("no number"))
    (True, False)
    """
    if error is None:
        return False
    # The allocator of the processor's memory has no type of its own.
    own = isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
    return own or lacks_memory(error.__cause__)


def _numbers(folder: Path, suffix: str | None = None) -> list[int]:
    """List the versions that files are named after."""
    if not folder.is_dir():
        return []
    found = (path for path in folder.iterdir() if path.stem.isascii() and path.stem.isdigit())
    return [int(path.stem) for path in found if suffix is None or path.suffix == suffix]
