"""Norm layers: which keep statistics, which have parameters, and how a pass can use its own statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

NORM_LAYERS = (_BatchNorm, _InstanceNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def batch_norms(module: nn.Module) -> list[_BatchNorm]:
    """List the batch-norm layers that keep statistics.

    >>> len(batch_norms(nn.Sequential(nn.BatchNorm2d(3), nn.GroupNorm(1, 3))))
    1
    """
    return [m for m in module.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]


def statistics_of(layers: Sequence[_BatchNorm]) -> list[Tensor]:
    """List the stored statistics of some layers."""
    return [buffer for layer in layers for buffer in layer.buffers(recurse=False)]


@contextmanager
def batch_statistics(layers: Sequence[_BatchNorm], momentum: float) -> Iterator[None]:
    """Let passes normalise by their own statistics and move the stored ones by `momentum`."""
    usual = [(layer.training, layer.momentum) for layer in layers]
    for layer in layers:
        layer.training, layer.momentum = True, momentum
    try:
        yield
    finally:
        for layer, (training, value) in zip(layers, usual, strict=True):
            layer.training, layer.momentum = training, value


@contextmanager
def own_statistics(layers: Sequence[_BatchNorm]) -> Iterator[None]:
    """Let passes normalise by their own statistics and leave the stored ones alone."""
    # In copies, as a momentum of 0 times infinity is no 0, and what autograd keeps must not be written to.
    stored = [dict(layer._buffers) for layer in layers]
    for layer in layers:
        for name, buffer in layer._buffers.items():
            layer._buffers[name] = None if buffer is None else buffer.clone()
    try:
        with batch_statistics(layers, 0.0):
            yield
    finally:
        for layer, buffers in zip(layers, stored, strict=True):
            layer._buffers.update(buffers)


@contextmanager
def entering(classifier: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Keep what enters the named layers in the last pass, by name."""
    inputs: dict[str, Tensor] = {}

    def keep(name: str, given: tuple[Tensor, ...]) -> None:
        inputs[name] = given[0]

    hooks = [
        classifier.get_submodule(name).register_forward_pre_hook(lambda _, given, name=name: keep(name, given))
        for name in names
    ]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()
