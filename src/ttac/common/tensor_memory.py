"""How much memory the tensors of an object take."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def held_bytes(value: object, counted: set[int] | None = None) -> int:
    """Count the bytes of all tensors that `value` and its attributes hold, shared memory once, and copy nothing.

    `counted` has the addresses of what was met before, is written to, and makes several calls share what they count.

    >>> rows = torch.zeros(10, 4)
    >>> held_bytes({"all": rows, "some": rows[:3], "other": torch.zeros(2, dtype=torch.uint8)})
    162
    """
    counted = set() if counted is None else counted
    # A view keeps all of the memory that it looks into.
    memory = value.untyped_storage() if isinstance(value, Tensor) else None
    address = id(value) if memory is None else memory.data_ptr()
    if address in counted:
        return 0
    counted.add(address)
    return memory.nbytes() if memory is not None else sum(held_bytes(item, counted) for item in _held(value))


def _held(value: object) -> Iterable[object]:
    if isinstance(value, nn.Module):  # whatever else hangs on a network is not the adapter's
        return (*value.parameters(), *value.buffers())
    if isinstance(value, torch.optim.Optimizer):
        return value.state.values()
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset | deque):
        return value
    if isinstance(value, type):
        return ()
    slots = (getattr(value, name, None) for name in getattr(value, "__slots__", ()))
    return (*getattr(value, "__dict__", {}).values(), *slots)
