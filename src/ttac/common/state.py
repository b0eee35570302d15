"""What a stream changes, declared once: reset, save, load and memory accounting follow from the declaration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class Stateful:
    """An object that declares the attributes which a stream changes, each with what it is before the first sample.

    A value may be a tensor, a number, text, None, a dataclass or dict of these, a generator, an optimizer, a module, or
    another `Stateful`, or a dict of those, which are reset and loaded in place.

    >>> class Counter(Stateful):
    ...     def __init__(self):
    ...         self.declare(count=lambda: 0, sums=lambda: torch.zeros(2))
    >>> counter = Counter()
    >>> counter.count += 3
    >>> state = counter.state()
    >>> counter.reset_state()
    >>> counter.count, state["count"]
    (0, 3)
    """

    growing: ClassVar[tuple[str, ...]] = ()  # declared attributes whose tensors may become longer or shorter

    def declare(self, **fresh: Callable[[], Any]) -> None:
        """Name attributes that a stream changes, with functions that make them as they are before the first sample."""
        vars(self).setdefault("_declared", {}).update(fresh)
        for name, make in fresh.items():
            setattr(self, name, make())

    def reset_state(self) -> None:
        """Make every declared attribute what it was before the first sample."""
        for name, make in self._makers().items():
            value = getattr(self, name)
            parts = list(value.values()) if isinstance(value, dict) else [value]
            if parts and all(isinstance(part, Stateful) for part in parts):
                for part in parts:
                    part.reset_state()
            else:
                setattr(self, name, make())

    def state(self) -> dict[str, Any]:
        """Give every declared attribute as plain values and tensors, by name; tensors are not copied."""
        return {name: _saved(getattr(self, name)) for name in self._makers()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave to an object that has just been reset; raise where it does not fit."""
        declared = self._makers()
        if not isinstance(state, dict) or state.keys() != declared.keys():
            raise ValueError(f"the state has {', '.join(map(str, state))}, expected {', '.join(declared)}")
        for name in declared:
            setattr(self, name, _restored(name, getattr(self, name), state[name], name in self.growing))

    def _makers(self) -> dict[str, Callable[[], Any]]:
        makers: dict[str, Callable[[], Any]] = vars(self).get("_declared", {})
        return makers


def _saved(value: Any) -> Any:
    if isinstance(value, Stateful):
        return value.state()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, torch.optim.Optimizer | nn.Module):
        return dict(value.state_dict())
    if dataclasses.is_dataclass(value):
        return {field.name: _saved(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {name: _saved(item) for name, item in value.items()}
    if not isinstance(value, Tensor | int | float | str | list | tuple | None):
        raise TypeError(f"{type(value).__name__} cannot be declared: a state is of tensors and plain values")
    return value


def _restored(name: str, fresh: Any, saved: Any, growing: bool) -> Any:
    """Make of what was saved what the declared attribute is, or raise where it cannot be that."""
    if isinstance(fresh, Stateful):
        fresh.load_state(saved)
    elif isinstance(fresh, torch.Generator):
        fresh.set_state(saved.cpu())
    elif isinstance(fresh, torch.optim.Optimizer | nn.Module):
        fresh.load_state_dict(saved)
    elif isinstance(fresh, Tensor):
        return _restored_tensor(name, fresh, saved, growing)
    elif dataclasses.is_dataclass(fresh) and not isinstance(fresh, type):
        items = {field.name: getattr(fresh, field.name) for field in dataclasses.fields(fresh)}
        return dataclasses.replace(fresh, **_restored(name, items, saved, growing))
    elif isinstance(fresh, dict) and fresh:
        if saved.keys() != fresh.keys():
            raise ValueError(f"{name} has {', '.join(map(str, saved))}, expected {', '.join(map(str, fresh))}")
        return {key: _restored(f"{name}.{key}", fresh[key], saved[key], growing) for key in fresh}
    else:
        if fresh is not None and type(saved) is not type(fresh):
            raise ValueError(f"{name} is {type(saved).__name__}, expected {type(fresh).__name__}")
        return saved
    return fresh


def _restored_tensor(name: str, fresh: Tensor, saved: Any, growing: bool) -> Tensor:
    """Take a tensor to the device of the fresh one; one that grows may have another length."""
    fits = isinstance(saved, Tensor) and saved.dtype == fresh.dtype and saved.ndim == fresh.ndim
    if not fits or saved.shape[growing:] != fresh.shape[growing:]:
        shape = f"{saved.dtype} {list(saved.shape)}" if isinstance(saved, Tensor) else type(saved).__name__
        raise ValueError(f"{name} is {shape}, expected {fresh.dtype} {list(fresh.shape)}")
    if saved.shape != fresh.shape:
        return saved.to(fresh.device)
    with torch.no_grad():
        return fresh.copy_(saved)  # in place, as an optimizer may hold on to it


def cloned(value: Any) -> Any:
    """Copy what `Stateful.state` gives, so that it stays as it is."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: cloned(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(cloned, value))
    return value


def tensor_bytes(value: object, counted: set[int] | None = None) -> int:
    """Count the bytes of all tensors that `value` and its attributes hold, shared memory once, and copy nothing.

    `counted` has the addresses of what was met before, is written to, and makes several calls share what they count.

    >>> rows = torch.zeros(10, 4)
    >>> tensor_bytes({"all": rows, "some": rows[:3], "other": torch.zeros(2, dtype=torch.uint8)})
    162
    """
    counted = set() if counted is None else counted
    # A view keeps all of the memory that it looks into.
    memory = value.untyped_storage() if isinstance(value, Tensor) else None
    address = id(value) if memory is None else memory.data_ptr()
    if address in counted:
        return 0
    counted.add(address)
    return memory.nbytes() if memory is not None else sum(tensor_bytes(item, counted) for item in _held(value))


def _held(value: object) -> Any:
    if isinstance(value, nn.Module):  # whatever else hangs on a network is not the adapter's
        return (*value.parameters(), *value.buffers())
    if isinstance(value, torch.optim.Optimizer):
        return value.state.values()
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return value
    return () if isinstance(value, type) or callable(value) else getattr(value, "__dict__", {}).values()
