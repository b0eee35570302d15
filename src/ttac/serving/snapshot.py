"""The snapshot: all that a killed adapter's successor goes on from."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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


def state_digest(*states: Any) -> str:
    """Give a check sum of states of tensors and plain values, to the last bit; devices and orders of names are alike.

    >>> state_digest({"a": torch.ones(2), "b": [1.5]}) == state_digest({"b": [1.5], "a": torch.ones(2)})
    True
    >>> state_digest({"a": torch.ones(2)}) == state_digest({"a": torch.ones(2, 1)})
    False
    """
    return _digest(states).hex()


def _digest(value: Any) -> bytes:
    """Hash a value by what it is and the hashes of what it holds."""
    parts: list[bytes | memoryview] = []
    if isinstance(value, Tensor):
        head = f"tensor {value.dtype} {list(value.shape)}\n"
        parts = [value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data]
    elif isinstance(value, Mapping):
        head = "by name"
        parts = [_digest(item) for name in sorted(value, key=repr) for item in (name, value[name])]
    elif isinstance(value, list | tuple):
        head, parts = "by number", [_digest(item) for item in value]
    else:
        head = f"plain {value!r}"
    digest = hashlib.sha256(head.encode())
    for part in parts:
        digest.update(part)
    return digest.digest()
