"""Find the final layer of any network, by convention first and by a probe pass where conventions are silent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from ttac.common.lookup import some
from ttac.model.pixels import pretrained_config
from ttac.model.pooled_head import pooled

# torchvision: fc, classifier, heads.head, head; timm: get_classifier(); transformers: classifier, head; plain: linear.
USUAL_NAMES = ("fc", "classifier", "head", "linear", "heads", "heads.head", "head.fc")
PROBE_SIDES = (32, 224, 28, 64, 96, 128, 256, 384)


class HeadError(ValueError):
    """No usable final layer was found; the message lists what was tried."""


def output_logits(output: Any) -> Tensor:
    """Take the logits out of what a model returns: a tensor, `.logits`, "logits" or "out" of a dict, the first one.

    >>> output_logits({"out": torch.zeros(2, 3)}).shape, output_logits((torch.zeros(2, 3), None)).shape
    (torch.Size([2, 3]), torch.Size([2, 3]))
    """
    logits = getattr(output, "logits", output)
    if isinstance(logits, Mapping):
        logits = next((logits[key] for key in ("logits", "out") if key in logits), output)
    elif isinstance(logits, tuple | list) and logits and isinstance(logits[0], Tensor) and logits[0].ndim == 2:
        logits = logits[0]
    if not isinstance(logits, Tensor):
        kind = f"dict of {some(list(output))}" if isinstance(output, Mapping) else type(output).__name__
        raise HeadError(
            f"the model returns {kind}; expected a tensor, an object with .logits, a dict with 'logits' or 'out', or a "
            "tuple whose first element is [N, K]: wrap it in a module that returns the logits"
        )
    return logits


def input_channels(model: nn.Module) -> int | None:
    """Read the number of image channels off the first convolution, None where there is no convolution.

    >>> input_channels(nn.Conv2d(1, 8, 3))
    1
    """
    return next((module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)), None)


def first_parameter(model: nn.Module) -> nn.Parameter:
    """Take the parameter whose device and dtype the model's input must have.

    >>> first_parameter(nn.Linear(4, 2).bfloat16()).dtype
    torch.bfloat16
    """
    return next(parameter for parameter in model.parameters() if parameter.is_floating_point())


def probe_images(model: nn.Module) -> Tensor:
    """Make a small batch of grey noise `[2, C, H, W]` of a size that the model accepts.

    >>> probe_images(nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())).shape
    torch.Size([2, 3, 32, 32])
    """
    tried = []
    reference = first_parameter(model)
    generator = torch.Generator().manual_seed(0)
    for channels, height, width in _probe_shapes(model):
        images = torch.rand(2, channels, height, width, generator=generator).to(reference.device, reference.dtype)
        try:
            with evaluating(model), torch.no_grad():
                model(images)
        except Exception as error:  # a model raises what it likes at a size it does not accept
            tried.append(f"{channels} x {height} x {width}: {' '.join(str(error).split())[:80]}")
        else:
            return images
    raise HeadError("the model accepts none of the image sizes tried:\n  " + "\n  ".join(tried))


def probe_logits(model: nn.Module) -> Tensor:
    """Run a model on small probe images and give its logits `[2, K]`; features without a head on them are refused."""
    ends = [found[1] for name in USUAL_NAMES if (found := _usual_layer(model, name)) is not None]
    ends += [model.get_classifier()] if hasattr(model, "get_classifier") else []  # type: ignore[operator]
    if any(isinstance(end, nn.Identity) for end in ends):
        raise HeadError("the model gives features: its classification layer is an identity")
    with evaluating(model), torch.no_grad():
        logits = output_logits(model(probe_images(model)))
    if logits.ndim != 2:
        raise HeadError(f"the model gives an output of shape {tuple(logits.shape)}; expected [N, K]")
    return logits


def find_head(model: nn.Module, name: str | None = None) -> str:
    """Return the dotted name of the final layer: a linear one, or a 1 x 1 convolution that acts as one.

    >>> find_head(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)))
    '1'
    """
    if name is not None:
        return _named_head(model, name)
    if (by_timm := _timm_head(model)) is not None:
        return by_timm
    usual = dict(found for name in USUAL_NAMES if (found := _usual_layer(model, name)) is not None)
    # Keyed by the layer, as two names may lead to one.
    heads = {layer: name for name, layer in usual.items() if isinstance(layer, nn.Linear)}
    if len(heads) == 1:
        return heads.popitem()[1]
    linears = _linear_layers(model)
    if len(linears) == 1 and not usual:
        return linears[0]
    return _probed_head(model, [*linears, *_pointwise_layers(model)], usual)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode for a moment and give each module its own mode back.

    >>> model = nn.Dropout()
    >>> with evaluating(model):
    ...     model.training
    False
    >>> model.training
    True
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _probe_shapes(model: nn.Module) -> Iterator[tuple[int, int, int]]:
    known = input_channels(model)
    config = pretrained_config(model)
    fixed = getattr(getattr(model, "patch_embed", None), "img_size", None)  # timm's transformers, as they were built
    if isinstance(fixed, tuple) and len(fixed) == 2:
        yield known or 3, *fixed
    # What timm and transformers note; it is stale where a model was built for another size or other channels.
    if config.get("input_size"):
        channels, height, width = config["input_size"]
        yield channels, height, width
    for owner in (model, getattr(model, "config", None)):
        side = getattr(owner, "image_size", None)
        if isinstance(side, int):
            yield known or 3, side, side
    for side in PROBE_SIDES:
        for channels in (3, 1) if known is None else (known,):
            yield channels, side, side


def _is_pointwise(module: nn.Module) -> bool:
    kind = (module.kernel_size, module.stride, module.groups) if isinstance(module, nn.Conv2d) else None
    return kind == ((1, 1), (1, 1), 1) and module.padding in ((0, 0), "valid", "same")


def _reason_against(model: nn.Module, name: str) -> str | None:
    """Say why a layer is no head, None where it may be one."""
    module = model.get_submodule(name)
    if isinstance(module, nn.Linear) or (_is_pointwise(module) and _acts_linearly(model, name)):
        return None
    if _is_pointwise(module):
        return (
            "is a convolution that is no linear layer on averaged features (something such as an activation stands "
            "between it and the average)"
        )
    if isinstance(module, nn.Conv2d):
        return "is a convolution of more than single positions; only linear heads have the class means of anchors"
    if isinstance(module, nn.Identity):
        return "is an identity; build the model with its classification layer (num_classes > 0)"
    return f"is a {type(module).__name__}, not a linear layer"


def _acts_linearly(model: nn.Module, name: str) -> bool:
    """Try whether the output of a 1 x 1 convolution, averaged over positions, is the model's output.

    With random weights in its place: those of the model may be such that an activation behind it does nothing.
    """
    layer, seen = model.get_submodule(name), []
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"{name}.{key}": torch.randn(value.shape, generator=generator).to(value)
        for key, value in layer.named_parameters()
    }
    handle = layer.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    try:
        images = probe_images(model)
        seen.clear()
        with evaluating(model), torch.no_grad():
            output = output_logits(functional_call(model, weights, (images,)))
            if len(seen) != 1 or seen[0].ndim != 4:
                return False
            weight, bias = weights[f"{name}.weight"][:, :, 0, 0], weights.get(f"{name}.bias")
            expected = F.linear(pooled(seen[0]), weight, bias)
    except HeadError:
        return False
    finally:
        handle.remove()
    return same_logits(expected, output)


def same_logits(first: Tensor, second: Tensor) -> bool:
    """Whether two ways to compute the same logits agree, but for rounding."""
    # Relative to the largest logit: a fixed tolerance would let any layer pass where all logits are small.
    rtol = 1e-4 if second.dtype in (torch.float32, torch.float64) else 5e-2
    atol = rtol * float(second.detach().nan_to_num().abs().max())
    return first.shape == second.shape and torch.allclose(first, second, rtol, atol, equal_nan=True)


def _named_head(model: nn.Module, name: str) -> str:
    try:
        reason = _reason_against(model, name)
    except AttributeError:
        reason = "does not exist"
    if reason is None:
        return name
    raise HeadError(f"head={name!r} {reason}. Linear layers of this model: {some(_linear_layers(model), 20) or 'none'}")


def _timm_head(model: nn.Module) -> str | None:
    """Name the layer that timm's `get_classifier()` gives, None where that is a container of layers."""
    if not hasattr(model, "get_classifier"):
        return None
    head = model.get_classifier()  # type: ignore[operator]
    if isinstance(head, tuple | list):
        raise HeadError(
            f"get_classifier() gives {len(head)} heads, whose outputs a distilled model averages: "
            "use the variant without distillation"
        )
    name = next((name for name, module in model.named_modules() if module is head), None)
    if name is None or not isinstance(head, nn.Linear | nn.Conv2d | nn.Identity):
        return None
    if (reason := _reason_against(model, name)) is not None:
        raise HeadError(f"the layer that get_classifier() gives {reason}")
    return name


def _usual_layer(model: nn.Module, name: str) -> tuple[str, nn.Module] | None:
    """Look up a usual name, and the last layer with weights where it is a sequence (`classifier.6`)."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return None
    if isinstance(module, nn.Sequential):
        for child, layer in reversed(list(module.named_children())):
            if next(layer.parameters(), None) is not None:
                return f"{name}.{child}", layer
    return name, module


def _linear_layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def _pointwise_layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if _is_pointwise(module)]


def _probed_head(model: nn.Module, layers: list[str], usual: dict[str, nn.Module]) -> str:
    """Choose the layer whose output, averaged where it is a map, is the model's output in a probe pass."""
    seen = [f"{name!r} {_reason_against(model, name) or 'may be the head'}" for name in usual]
    story = (
        f"of the usual names {', '.join(USUAL_NAMES)}: {'; '.join(seen) or 'none exists'}. "
        f"Linear layers: {some(_linear_layers(model), 20) or 'none'}"
    )
    if not layers:
        raise HeadError(f"the model has no linear layer, so it has no head to anchor. Tried: {story}")
    outputs: dict[str, Tensor] = {}
    hooks = []
    for name in layers:
        hook = lambda _module, _inputs, output, name=name: outputs.__setitem__(name, pooled(output))  # noqa: E731
        hooks.append(model.get_submodule(name).register_forward_hook(hook))
    try:
        images = probe_images(model)
        outputs.clear()
        with evaluating(model), torch.no_grad():
            logits = output_logits(model(images))
    except HeadError as error:
        raise HeadError(f"no single head by name, and no probe pass was possible: {error}\nTried: {story}") from error
    finally:
        for handle in hooks:
            handle.remove()
    matches = [name for name, output in outputs.items() if same_logits(output, logits)]
    matches = [name for name in matches if _reason_against(model, name) is None]
    if len(matches) == 1:
        return matches[0]
    if matches:
        found = f"each of {some(matches)} gives the model's output in a probe pass: name the head with head=..."
    else:
        found = "no linear layer gives the model's output in a probe pass, so something follows the last one."
    raise HeadError(f"{found} Tried: {story}")
