"""Find the final linear layer of any network, by convention first and by a probe pass where conventions are silent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ttac.common.lookup import some

# torchvision: fc, classifier, heads.head, head; timm: get_classifier(); transformers: classifier, head; plain: linear.
USUAL_NAMES = ("fc", "classifier", "head", "linear", "heads", "heads.head", "head.fc")
PROBE_SIDES = (32, 224, 28, 64, 96, 128, 256, 384)


class HeadError(ValueError):
    """No usable final linear layer was found; the message lists what was tried."""


def output_logits(output: Any) -> Tensor:
    """Take the logits out of what a model returns: a tensor, or an object with `.logits`.

    >>> output_logits(torch.zeros(2, 3)).shape
    torch.Size([2, 3])
    """
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise HeadError(f"the model returns {type(output).__name__}; expected a tensor or an object with .logits")
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


def pretrained_config(model: nn.Module) -> Mapping[str, Any]:
    """Read timm's `pretrained_cfg`, a dict or a dataclass; other models have an empty one.

    >>> pretrained_config(nn.Linear(4, 2))
    {}
    """
    config = getattr(model, "pretrained_cfg", None) or {}
    return config if isinstance(config, Mapping) else vars(config)


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
    """Return the dotted name of the final linear layer.

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
    return _probed_head(model, linears, usual)


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


def _reason_against(module: nn.Module) -> str | None:
    if isinstance(module, nn.Linear):
        return None
    if isinstance(module, nn.Conv2d):
        return "is a convolution; only linear heads have the class means that anchors need"
    if isinstance(module, nn.Identity):
        return "is an identity; build the model with its classification layer (num_classes > 0)"
    return f"is a {type(module).__name__}, not a linear layer"


def _named_head(model: nn.Module, name: str) -> str:
    try:
        reason = _reason_against(model.get_submodule(name))
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
    if isinstance(head, nn.Conv2d | nn.Identity):
        raise HeadError(f"the layer that get_classifier() gives {_reason_against(head)}")
    return next(
        (name for name, module in model.named_modules() if module is head and isinstance(head, nn.Linear)), None
    )


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


def _probed_head(model: nn.Module, linears: list[str], usual: dict[str, nn.Module]) -> str:
    """Choose the linear layer whose output is the model's output in a probe pass."""
    seen = [f"{name!r} {_reason_against(layer) or 'is a linear layer'}" for name, layer in usual.items()]
    story = (
        f"of the usual names {', '.join(USUAL_NAMES)}: {'; '.join(seen) or 'none exists'}. "
        f"Linear layers: {some(linears, 20) or 'none'}"
    )
    if not linears:
        raise HeadError(f"the model has no linear layer, so it has no head to anchor. Tried: {story}")
    outputs: dict[str, Tensor] = {}
    hooks = []
    for name in linears:
        hook = lambda _module, _inputs, output, name=name: outputs.__setitem__(name, output)  # noqa: E731
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
    matches = [name for name, out in outputs.items() if out.shape == logits.shape and torch.equal(out, logits)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        found = f"each of {some(matches)} gives the model's output in a probe pass: name the head with head=..."
    else:
        found = "no linear layer gives the model's output in a probe pass, so something follows the last one."
    raise HeadError(f"{found} Tried: {story}")
