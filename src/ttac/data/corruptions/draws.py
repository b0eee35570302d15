"""Random numbers that belong to a sample: the same whatever batch, order or device it comes in."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SEEDS = 2**64  # that there are: Philox takes 64 bits


class Draws:
    """Draws for each of `index [N]`, by the seed, a purpose and the sample's own index; they move on with each call.

    Philox is a counter-based generator. Its key is (seed, index), the upper half of its counter is the purpose, and
    the number of the call comes next, so that no two of them ever meet. Numbers are made on the CPU and moved, so that
    every device has the same.

    >>> Draws(0, "noise", torch.tensor([5]), torch.device("cpu")).normal(2).shape
    torch.Size([1, 2])
    """

    def __init__(self, seed: int, purpose: str, index: Tensor, device: torch.device) -> None:
        self.device = device
        self._index = index.tolist()
        if self._index and min(self._index) < 0:
            raise ValueError(f"the index of a sample must not be negative: {min(self._index)}")
        words = np.frombuffer(hashlib.sha256(purpose.encode()).digest()[:16], "<u8")
        # Unsigned from the start: of a list of numbers of more than 63 bits NumPy makes floats, and loses bits.
        counter, key = np.array([0, 0, *words], np.uint64), np.array([seed, 0], np.uint64)
        # Setting one generator to each sample in turn takes a tenth of the time of making one for each.
        self._philox = np.random.Philox(counter=counter, key=key)
        self._start = self._philox.state
        self._generator = np.random.Generator(self._philox)

    def normal(self, *shape: int) -> Tensor:
        """Draw standard normal numbers `[N, *shape]`."""
        return self._fill(shape, lambda row: self._generator.standard_normal(dtype=np.float32, out=row))

    def uniform(self, *shape: int) -> Tensor:
        """Draw numbers in [0, 1) `[N, *shape]`, each a multiple of 2^-24."""
        return self._fill(shape, lambda row: self._generator.random(dtype=np.float32, out=row))

    def _fill(self, shape: tuple[int, ...], fill: Callable[[NDArray[np.float32]], object]) -> Tensor:
        rows = np.empty((len(self._index), math.prod(shape)), np.float32)
        start = self._start["state"]
        for sample, row in zip(self._index, rows, strict=True):
            start["key"][1] = sample
            self._philox.state = self._start
            fill(row)
        start["counter"][1] += 1
        return torch.from_numpy(rows).view(-1, *shape).to(self.device)
