"""How batch-norm statistics follow a stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def batch_norms(module: nn.Module) -> list[_BatchNorm]:
    """List the batch-norm layers that keep statistics.

    >>> len(batch_norms(nn.Sequential(nn.BatchNorm2d(3), nn.GroupNorm(1, 3))))
    1
    """
    return [m for m in module.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]


class BatchNormTracker:
    """Moves batch-norm statistics by the number of samples seen, as running Gaussians move.

    A minibatch of n has the weight `n / seen`, and the past counts as at most `clip` samples: the first window replaces
    the source's statistics, later ones are averaged with it. A fixed momentum of 0.1 predicts thousands of samples with
    half-source statistics, and even a small share of the source's variances drowns those of a low-contrast target.
    """

    def __init__(self, module: nn.Module, *, clip: int) -> None:
        self.layers = batch_norms(module)
        self.clip = clip
        self.seen = 0
        self.refused = 0  # passes whose statistics were not finite

    @contextmanager
    def following(self, count: int) -> Iterator[None]:
        """Let one forward pass of `count` samples normalise by its own statistics and move the stored ones.

        Statistics that are not finite would never leave the average again: they are refused and counted.
        """
        before = self.snapshot()
        self.seen = min(self.seen + count, self.clip)  # what is beyond the clip has no effect and need not be kept
        with self._training(count / max(self.seen, count)):
            yield
        if not self._finite():
            self.restore(before)
            self.refused += 1

    def _finite(self) -> bool:
        """Look at all layers at once: one by one, each look would wait for a GPU."""
        floating = [buffer for buffer in self._buffers() if buffer.is_floating_point()]
        # The largest entries, as sums of squares overflow in half precision.
        return not floating or bool(torch.stack(torch._foreach_norm(floating, float("inf"))).isfinite().all())

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Let one forward pass normalise by its own statistics and leave the stored ones alone."""
        # In copies, as a momentum of 0 times infinity is no 0, and what autograd keeps must not be written to.
        stored = [dict(layer._buffers) for layer in self.layers]
        for layer in self.layers:
            for name, buffer in layer._buffers.items():
                layer._buffers[name] = None if buffer is None else buffer.clone()
        try:
            with self._training(0.0):
                yield
        finally:
            for layer, buffers in zip(self.layers, stored, strict=True):
                layer._buffers.update(buffers)

    @contextmanager
    def _training(self, momentum: float) -> Iterator[None]:
        usual = [layer.momentum for layer in self.layers]
        for layer in self.layers:
            layer.training, layer.momentum = True, momentum
        try:
            yield
        finally:
            for layer, value in zip(self.layers, usual, strict=True):
                layer.training, layer.momentum = False, value

    def _buffers(self) -> Iterator[Tensor]:
        return (buffer for layer in self.layers for buffer in layer.buffers(recurse=False))

    def snapshot(self) -> tuple[int, list[Tensor]]:
        """Copy the stored statistics, for a step that may have to be undone."""
        return self.seen, [buffer.clone() for buffer in self._buffers()]

    def restore(self, snapshot: tuple[int, list[Tensor]]) -> None:
        """Put a snapshot back."""
        self.seen, copies = snapshot
        for buffer, copy in zip(self._buffers(), copies, strict=True):
            buffer.copy_(copy)

    def state(self) -> dict[str, int]:
        """Give what is not in the layers themselves."""
        return {"seen": self.seen, "refused": self.refused}

    def load(self, state: dict[str, int]) -> None:
        """Take back what `state` gave."""
        self.seen, self.refused = state["seen"], state["refused"]
