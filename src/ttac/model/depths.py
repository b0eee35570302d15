"""Where a network can be looked into: the outputs of its blocks, and their channel vectors, for any architecture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import activation

from ttac.model.classifier import Classifier
from ttac.model.heads import evaluating, probe_images
from ttac.model.norms import NORM_LAYERS

CONTAINERS = (nn.Sequential, nn.ModuleList)
ACTIVATIONS = tuple(
    kind
    for kind in vars(activation).values()
    if isinstance(kind, type) and issubclass(kind, nn.Module) and kind not in (nn.Module, nn.MultiheadAttention)
)
CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


def depth_names(classifier: Classifier, images: Tensor | None = None) -> tuple[str, ...]:
    """Name the modules of `classifier.model` whose outputs tell what the network sees at each depth, in its order.

    These are the blocks: what sequences and lists of modules are made of, outermost first, if it has layers of its own
    and puts out maps `[N, C, H, W]` or tokens `[N, T, C]`, of more than one position, once in a pass. A network without
    blocks is looked at behind its activations, else its norms, else its convolutions. `images` are run to find out;
    without them a size that the model accepts is looked for.

    >>> from ttac.model.networks import ResNet
    >>> depth_names(Classifier(ResNet(8, 10, width=4), mean=0, std=1))
    ('layer1.0', 'layer2.0', 'layer3.0')
    """
    usable = _usable(classifier, images)
    found = _blocks(classifier.model, "", usable)
    # One alone is a backbone that stands in a sequence with its head: its own blocks are looked for.
    while len(found) == 1 and (inner := _blocks(classifier.model.get_submodule(found[0]), found[0], usable)):
        found = inner
    for kinds in (ACTIVATIONS, NORM_LAYERS, CONVOLUTIONS):
        found = found or [name for name, module in classifier.model.named_modules() if isinstance(module, kinds)]
        found = [name for name in found if name in usable]
    return tuple(found)


@contextmanager
def watched(classifier: Classifier, names: tuple[str, ...], receive: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Hand the output of each named module, channels first, to `receive` in the moment that it is made."""
    handles = []

    def watch(name: str, module: nn.Module) -> None:
        def hook(module: nn.Module, _inputs: Any, output: Any) -> None:
            tensor = _tensor_of(output)
            if tensor is None:
                raise ValueError(f"the output of {name} is neither [N, C, H, W] nor [N, T, C] in this pass")
            receive(name, _channels_first(module, tensor))

        handles.append(module.register_forward_hook(hook))

    try:
        for name in names:
            watch(name, classifier.model.get_submodule(name))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def recorded(classifier: Classifier, names: tuple[str, ...]) -> Iterator[dict[str, Tensor]]:
    """Keep what the named modules put out in the last pass, by name: `[N, C, H, W]` or `[N, T, C]`.

    >>> from ttac.model.networks import ResNet
    >>> classifier = Classifier(ResNet(8, 10, width=4), mean=0, std=1)
    >>> with recorded(classifier, ("layer3.0",)) as outputs:
    ...     _ = classifier(torch.zeros(2, 3, 8, 8))
    >>> outputs["layer3.0"].shape
    torch.Size([2, 16, 2, 2])
    """
    outputs: dict[str, Tensor] = {}
    with watched(classifier, names, outputs.__setitem__):
        yield outputs


def channel_vectors(output: Tensor) -> Tensor:
    """Line up the channels at all positions: `[N, C, H, W] -> [N H W, C]`, `[N, T, C] -> [N T, C]`.

    >>> channel_vectors(torch.zeros(2, 3, 4, 5)).shape, channel_vectors(torch.zeros(2, 7, 3)).shape
    (torch.Size([40, 3]), torch.Size([14, 3]))
    """
    if output.ndim == 4 and not output.is_contiguous(memory_format=torch.channels_last):
        # Whole maps are copied, which is several times as fast as to gather the channels of each position.
        return output.transpose(0, 1).flatten(1).mT
    last = output.permute(0, 2, 3, 1) if output.ndim == 4 else output
    return last.reshape(-1, last.shape[-1])


def _usable(classifier: Classifier, images: Tensor | None) -> set[str]:
    """Name the modules that put out maps or tokens of all samples once in a pass, and are not written over later."""
    images = probe_images(classifier.model).to(classifier.mean) if images is None else images
    with evaluating(classifier), torch.no_grad():
        classifier(images[:1])  # the first pass of all may be followed by a second one that verifies the head
    runs: Counter[str] = Counter()
    made: dict[str, tuple[Tensor, int]] = {}
    handles = []

    def watch(name: str, module: nn.Module) -> None:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            runs[name] += 1
            tensor = _tensor_of(output)
            if tensor is not None and len(tensor) == len(images) and _positions(tensor) > 1:
                made[name] = tensor, tensor._version

        handles.append(module.register_forward_hook(hook))

    try:
        for name, module in classifier.model.named_modules():
            watch(name, module)
        with evaluating(classifier), torch.no_grad():
            classifier(images)
    finally:
        for handle in handles:
            handle.remove()
    # What an activation in place has changed would be another tensor to who looks at once than to who looks later.
    return {name for name, (tensor, version) in made.items() if runs[name] == 1 and tensor._version == version}


def _tensor_of(output: Any) -> Tensor | None:
    """Take maps or tokens out of what a module returns, itself or first in a tuple; None where it has none."""
    if isinstance(output, tuple | list) and output:
        output = output[0]
    if not isinstance(output, Tensor) or not output.is_floating_point():
        return None
    return output if output.ndim in (3, 4) else None


def _positions(output: Tensor) -> int:
    return output.shape[1] if output.ndim == 3 else output.shape[2] * output.shape[3]


def _blocks(module: nn.Module, prefix: str, usable: set[str]) -> list[str]:
    found = []
    for child_name, child in module.named_children():
        name = f"{prefix}.{child_name}" if prefix else child_name
        composite = any(next(part.parameters(), None) is not None for part in child.children())
        is_block = isinstance(module, CONTAINERS) and composite and name in usable
        if is_block and not isinstance(child, CONTAINERS):
            found.append(name)
        else:
            found += _blocks(child, name, usable) or ([name] if is_block else [])
    return found


def _channels_first(module: nn.Module, output: Tensor) -> Tensor:
    """Turn maps `[N, H, W, C]`, as some transformers have them, into `[N, C, H, W]`, a view.

    Which it is, is told by the widths of the layers within.
    """
    if output.ndim == 3:
        return output
    first, last = set(), set()
    for part in module.modules():
        if isinstance(part, CONVOLUTIONS):
            first.add(part.out_channels)
        elif isinstance(part, nn.BatchNorm2d | nn.InstanceNorm2d):
            first.add(part.num_features)
        elif isinstance(part, nn.Linear):
            last.add(part.out_features)
        elif isinstance(part, nn.LayerNorm):
            last.add(part.normalized_shape[-1])
    is_last = output.shape[1] not in first and output.shape[3] in last
    return output.permute(0, 3, 1, 2) if is_last else output
