"""The snapshot: all that a killed adapter's successor goes on from."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ttac.serving.journal import Faults, Journal
from ttac.serving.state_folder import StateFolder

RETRY = 5.0  # seconds after which what could not be written is tried again


@dataclass
class Tally:
    """What a learner has counted since its state folder was begun."""

    samples: int = 0  # learned from
    refused_samples: int = 0  # by the guard
    bad_samples: int = 0  # that raised errors
    updates: int = 0
    publishes: int = 0
    guard_refusals: int = 0  # of what was learned
    rollbacks: int = 0
    resets: int = 0

    def load(self, counts: dict[str, int]) -> None:
        """Go on from the counts of a snapshot."""
        vars(self).update(counts)

    def since(self, counts: dict[str, int]) -> dict[str, int]:
        """Count from earlier counts on.

        >>> Tally(samples=7).since({"samples": 5})["samples"]
        2
        """
        return {name: count - counts.get(name, 0) for name, count in dataclasses.asdict(self).items()}


@dataclass(frozen=True)
class Snapshot:
    """A moment between two chunks of samples."""

    time: float  # Unix time
    version: int  # that was served
    origin: int  # version that its weights were first published as
    life: str  # of the shared memory that `position` is in
    position: int  # of the first sample in the ring that the adapter has not learned from
    paused: bool
    pending: bool  # whether the adapter has weights that were neither published nor undone
    tally: dict[str, int]
    adapter: dict[str, Any]
    guard: dict[str, Any] | None

    def __post_init__(self) -> None:
        """Refuse what no learner has written."""
        whole = (self.version, self.origin, self.position, *self.tally.values())
        if not all(isinstance(number, int) and number >= 0 for number in whole):
            raise ValueError(f"its numbers must be whole and not negative, not {whole}")
        Tally(**self.tally)

    @property
    def summary(self) -> dict[str, Any]:
        """What the status says of it."""
        return {"time": self.time, "version": self.version, "samples": self.tally["samples"]}


class SnapshotKeeper:
    """Reads the snapshot, and writes it when it is due; what cannot be written is journalled and tried again."""

    def __init__(self, folder: StateFolder, journal: Journal, faults: Faults, every: float) -> None:
        self._folder, self._journal, self._faults = folder, journal, faults
        self._every = every
        self._due = time.monotonic() + every
        self.saved: dict[str, Any] | None = None  # summary of the newest one

    @property
    def is_due(self) -> bool:
        """Whether it is time for the next one."""
        return time.monotonic() >= self._due

    def load(self) -> Snapshot | None:
        """Read the snapshot, None where there is none; raises an error of any type where it is damaged."""
        content = self._folder.load_snapshot()
        if content is None:
            return None
        found = Snapshot(**content)
        self.saved = found.summary
        return found

    def put_aside(self, error: Exception) -> None:
        """Keep a snapshot that cannot be gone on from out of the way."""
        self.saved = None
        self._journal.note("fault", f"the snapshot {self._folder.set_snapshot_aside()}: {error}")

    def save(self, snapshot: Snapshot) -> str | None:
        """Write the snapshot, and give what went wrong."""
        content = {entry.name: getattr(snapshot, entry.name) for entry in dataclasses.fields(snapshot)}
        try:
            self._folder.save_snapshot(content)
        except (OSError, RuntimeError) as error:  # the latter where torch finds out first
            self._due = time.monotonic() + min(RETRY, self._every)
            self._faults.note("snapshot", f"the snapshot could not be written, and is tried again: {error}")
            return str(error)
        self._due = time.monotonic() + self._every
        self.saved = snapshot.summary
        samples = snapshot.tally["samples"]
        self._journal.note("snapshot", f"after {samples} samples", version=snapshot.version, samples=samples)
        return None


def state_digest(*states: Any) -> str:
    """Give a check sum of states of tensors and plain values, to the last bit; devices and orders of names are alike.

    >>> state_digest({"a": torch.ones(2), "b": [1.5]}) == state_digest({"b": [1.5], "a": torch.ones(2)})
    True
    >>> state_digest({"a": torch.ones(2)}) == state_digest({"a": torch.ones(2, 1)})
    False
    """
    digest = hashlib.sha256()
    for place, value in _leaves((), states):
        if isinstance(value, Tensor):
            digest.update(f"{place}: {value.dtype} {list(value.shape)}\n".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        else:
            digest.update(f"{place}: {value!r}\n".encode())
    return digest.hexdigest()


def _leaves(place: tuple[Any, ...], value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Walk over tensors and plain values with their places; what holds others comes with its length."""
    if isinstance(value, Mapping):
        yield place, ("by name", len(value))
        for name in sorted(value, key=repr):
            yield from _leaves((*place, name), value[name])
    elif isinstance(value, list | tuple):
        yield place, ("by number", len(value))
        for number, item in enumerate(value):
            yield from _leaves((*place, number), item)
    else:
        yield place, value
