"""Weights of a model as one content of bytes, for memory that two processes share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ttac.common.files import text_hash

ALIGNMENT = 64  # bytes: tensors begin where vector instructions like it


@dataclass(frozen=True)
class _Entry:
    """One tensor of the state dict, row-major from `offset` on."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    def view(self, content: bytearray | memoryview) -> Tensor:
        """Give the tensor in `content`, whose memory it shares."""
        count = math.prod(self.shape)
        if count == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(content, dtype=self.dtype, count=count, offset=self.offset).view(self.shape)


class WeightsLayout:
    """Where each tensor of a model's state dict is in a content of `size` bytes.

    The content begins with a hash of the layout, so weights of another model are never taken for this one's.

    >>> model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    >>> layout = WeightsLayout.of(model)
    >>> layout.load(layout.pack(model.state_dict()), other)
    >>> bool((model.weight == other.weight).all())
    True
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        lines = [f"{name!a} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in tensors.items()]
        self._head = text_hash(lines).encode()
        sizes = [_aligned(len(self._head)), *(_aligned(tensor.nbytes) for tensor in tensors.values())]
        *offsets, self.size = itertools.accumulate(sizes)
        self._entries = [
            _Entry(name, tensor.dtype, tuple(tensor.shape), offset)
            for (name, tensor), offset in zip(tensors.items(), offsets, strict=True)
        ]

    @classmethod
    def of(cls, model: nn.Module) -> WeightsLayout:
        """Lay out the state dict of a model."""
        state = model.state_dict()
        odd = [name for name, value in state.items() if not isinstance(value, Tensor)]
        if odd:
            raise ValueError(f"the model's state holds more than tensors ({', '.join(odd[:3])}), and cannot be served")
        own = {tensor.data_ptr() for tensor in itertools.chain(model.parameters(), model.buffers())}
        copies = [name for name, tensor in state.items() if tensor.data_ptr() not in own]
        if copies:
            raise ValueError(f"the model's state_dict gives copies ({', '.join(copies[:3])}), which cannot be filled")
        return cls(state)

    def pack(self, weights: Mapping[str, Tensor]) -> bytearray:
        """Copy a state dict of this layout, on any device, into a new content."""
        self._check(weights)
        content = bytearray(self.size)
        content[: len(self._head)] = self._head
        for entry in self._entries:
            entry.view(content).copy_(weights[entry.name].detach())
        return content

    def load(self, content: bytearray | memoryview, model: nn.Module) -> None:
        """Copy a content into the tensors that a model of this layout has; changes nothing where it does not fit."""
        if len(content) != self.size or bytes(content[: len(self._head)]) != self._head:
            raise ValueError("the content is of weights of another model")
        state = model.state_dict()
        self._check(state)
        for entry in self._entries:
            state[entry.name].copy_(entry.view(content))

    def _check(self, weights: Mapping[str, Tensor]) -> None:
        expected = {entry.name: f"{entry.dtype} {entry.shape}" for entry in self._entries}
        found = {name: f"{tensor.dtype} {tuple(tensor.shape)}" for name, tensor in weights.items()}
        differing = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
        if differing:
            said = [
                f"{name}: {found.get(name, 'missing')} for {expected.get(name, 'nothing')}" for name in differing[:3]
            ]
            more = ", ..." if len(differing) > 3 else ""
            raise ValueError(f"the weights are of another model ({', '.join(said)}{more})")


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
