"""Networks by name: of this package, of timm, of torchvision, or of a module of the user's own."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from ttac.common.lookup import suggestion
from ttac.model.networks import ResNet, ResNet18, ResNet50, VisionTransformer

Build = Callable[[int | None], nn.Module]  # number of classes, None: the architecture's own


@dataclass(frozen=True)
class OwnNetwork:
    """A network of this package: how it is made, what can be set, and the weight of shape `[width, channels, ...]`."""

    make: Callable[..., nn.Module]  # num_classes, channels=..., and the options
    stem: str
    options: tuple[str, ...] = ()


# The names end in _32 where timm or torchvision have one of theirs for larger images.
OWN: Mapping[str, OwnNetwork] = {
    **{
        f"resnet{depth}": OwnNetwork(partial(ResNet, depth), "conv1.weight", ("width", "stem_stride"))
        for depth in (8, 14, 20, 26)
    },
    "resnet18_32": OwnNetwork(ResNet18, "conv1.weight", ("width",)),
    "resnet50_32": OwnNetwork(ResNet50, "conv1.weight"),
    "vit_small_32": OwnNetwork(VisionTransformer, "patch_embed.weight", ("width", "depth")),
}


def new_network(
    arch: str, num_classes: int, *, channels: int = 3, options: Mapping[str, int] | None = None
) -> nn.Module:
    """Make an untrained network by name, of timm where torchvision has the name too.

    >>> import torch
    >>> new_network("resnet8", 10, channels=1, options={"width": 4})(torch.zeros(2, 1, 16, 16)).shape
    torch.Size([2, 10])
    """
    _, build = next(architectures(arch, channels=channels, options=options or {}, weights={}))
    return build(num_classes)


def architectures(
    arch: str, *, channels: int | None, options: Mapping[str, int], weights: Mapping[str, Tensor]
) -> Iterator[tuple[str, Build]]:
    """Yield everything that has the name, with where it comes from; timm and torchvision share many names.

    `weights` that the network is to take tell the channels and the width of one of this package, unless given.
    """
    unknown = [name for name in options if arch not in OWN or name not in OWN[arch].options]
    if unknown:
        known = ", ".join(f"{name} ({', '.join(own.options)})" for name, own in OWN.items() if own.options)
        raise ValueError(f"{arch} has no option {', '.join(unknown)}; those with options: {known}")
    if arch in OWN:
        yield "ttac", _own(OWN[arch], channels, options, weights)
        return
    if ":" in arch:
        yield "its own module", _factory(arch)
        return
    (timm, no_timm), (torchvision, no_torchvision) = optional_package("timm"), optional_package("torchvision")
    in_timm = timm is not None and timm.is_model(arch)
    if in_timm:
        yield "timm", lambda count: timm.create_model(arch, in_chans=channels or 3, **_count(count))
    in_torchvision = torchvision is not None and arch in torchvision.models.list_models(module=torchvision.models)
    if in_torchvision:
        yield "torchvision", lambda count: torchvision.models.get_model(arch, **_count(count))
    if not in_timm and not in_torchvision:
        raise ValueError(
            f"unknown architecture {arch!r}: neither {', '.join(OWN)}, nor package.module:callable, "
            f"{no_timm or 'nor a timm name'}, {no_torchvision or 'nor a torchvision name'}"
            f"{'' if timm is None else suggestion(arch, timm.list_models())}"
        )


def _count(num_classes: int | None) -> dict[str, int]:
    return {} if num_classes is None else {"num_classes": num_classes}


def _own(own: OwnNetwork, channels: int | None, options: Mapping[str, int], weights: Mapping[str, Tensor]) -> Build:
    chosen = dict(options)
    stem = weights.get(own.stem)
    if stem is not None and stem.ndim == 4:
        channels = stem.shape[1]
        if "width" in own.options:
            chosen.setdefault("width", stem.shape[0])
    return lambda count: own.make(count or 10, channels=channels or 3, **chosen)


def _factory(arch: str) -> Build:
    module_name, _, name = arch.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{arch!r} cannot be imported: {error}") from error
    if not callable(factory):
        raise ValueError(f"{arch!r} is {type(factory).__name__}; expected something to call for a network")
    parameters = inspect.signature(factory).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = parameters.get("num_classes")

    def build(count: int | None) -> nn.Module:
        if count is None and named is not None and named.default is named.empty:
            count = 10
        network = factory(**(_count(count) if named is not None or takes_any else {}))
        if not isinstance(network, nn.Module):
            raise ValueError(f"{arch!r} gives {type(network).__name__}; expected a torch.nn.Module")
        return network

    return build


def optional_package(name: str) -> tuple[Any, str]:
    """Import a package that need not be there; None and the reason where that fails.

    >>> optional_package("no_such_package")
    (None, 'no_such_package is not installed (pip install no_such_package)')
    """
    try:
        return importlib.import_module(name), ""
    except ImportError:
        return None, f"{name} is not installed (pip install {name})"
    except RuntimeError as error:  # a torchvision that was built for another torch
        return None, f"{name} is installed but cannot be imported ({error})"
