"""Find the final linear layer of any network, by convention first and by a probe pass where conventions are silent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

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


def input_channels(model: nn.Module) -> int:
    """Read the number of image channels off the first convolution, 3 where there is none.

    >>> input_channels(nn.Conv2d(1, 8, 3))
    1
    """
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    return first.in_channels if first is not None else 3


def probe_images(model: nn.Module) -> Tensor:
    """Make a small batch of grey noise `[2, C, H, W]` of a size that the model accepts.

    >>> probe_images(nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())).shape
    torch.Size([2, 3, 32, 32])
    """
    tried = []
    reference = next(model.parameters())
    generator = torch.Generator().manual_seed(0)
    for channels, height, width in _probe_shapes(model):
        images = torch.rand(2, channels, height, width, generator=generator).to(reference.device, reference.dtype)
        try:
            with evaluating(model), torch.no_grad():
                model(images)
        except (RuntimeError, ValueError, AssertionError) as error:
            tried.append(f"{channels} x {height} x {width}: {str(error).splitlines()[0][:80]}")
        else:
            return images
    raise HeadError("the model accepts none of the image sizes tried:\n  " + "\n  ".join(tried))


def find_head(model: nn.Module, name: str | None = None) -> str:
    """Return the dotted name of the final linear layer.

    >>> find_head(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)))
    '1'
    """
    if name is not None:
        return _named_head(model, name)
    if hasattr(model, "get_classifier"):
        return _timm_head(model)
    candidates = sorted({found for usual in USUAL_NAMES if (found := _linear_at(model, usual)) is not None})
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if len(candidates) == 1:
        return candidates[0]
    if len(linears) == 1:
        return linears[0]
    return _probed_head(model, linears, candidates)


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
    config = getattr(model, "pretrained_cfg", None) or {}
    if "input_size" in config:
        channels, height, width = config["input_size"]
        yield channels, height, width
    side = getattr(getattr(model, "config", None), "image_size", None)
    if isinstance(side, int):
        yield input_channels(model), side, side
    for side in PROBE_SIDES:
        yield input_channels(model), side, side


def _reason_against(module: nn.Module | None) -> str | None:
    if isinstance(module, nn.Linear):
        return None
    if isinstance(module, nn.Conv2d):
        return "is a convolution; only linear heads have the class means that anchors need"
    if isinstance(module, nn.Identity):
        return "is an identity; build the model with its classification layer (num_classes > 0)"
    if module is None:
        return "does not exist"
    return f"is a {type(module).__name__}, not a linear layer"


def _named_head(model: nn.Module, name: str) -> str:
    modules = dict(model.named_modules())
    reason = _reason_against(modules.get(name))
    if reason is None:
        return name
    linears = [key for key, module in modules.items() if isinstance(module, nn.Linear)]
    raise HeadError(f"head={name!r} {reason}. Linear layers of this model: {', '.join(linears) or 'none'}")


def _timm_head(model: nn.Module) -> str:
    head = model.get_classifier()  # type: ignore[operator]
    if isinstance(head, tuple | list):
        raise HeadError(
            f"get_classifier() gives {len(head)} heads (a distilled model averages them): "
            "set one of them to be the head, or use the variant without distillation"
        )
    name = next((name for name, module in model.named_modules() if module is head), None)
    reason = _reason_against(head)
    if name is None or reason is not None:
        raise HeadError(f"the layer that get_classifier() names ({name!r}) {reason or 'is not part of the model'}")
    return name


def _linear_at(model: nn.Module, name: str) -> str | None:
    """Resolve a usual name to a linear layer, the last one where the name is a sequence (`classifier.6`)."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return None
    if isinstance(module, nn.Linear):
        return name
    if isinstance(module, nn.Sequential) and len(module) and isinstance(module[-1], nn.Linear):
        return f"{name}.{next(reversed(dict(module.named_children())))}"
    return None


def _probed_head(model: nn.Module, linears: list[str], candidates: list[str]) -> str:
    """Choose the linear layer whose output is the model's output in a probe pass."""
    story = (
        f"usual names found: {', '.join(candidates) or 'none'}; "
        f"linear layers: {', '.join(linears[:20]) or 'none'}{', ...' if len(linears) > 20 else ''}"
    )
    if not linears:
        raise HeadError(f"the model has no linear layer, so it has no head to anchor ({story})")
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
        raise HeadError(f"no single head by name ({story}), and no probe was possible: {error}") from error
    finally:
        for handle in hooks:
            handle.remove()
    matches = [name for name, out in outputs.items() if out.shape == logits.shape and torch.equal(out, logits)]
    if len(matches) != 1:
        raise HeadError(
            f"{'several layers give' if matches else 'no linear layer gives'} the model's output in a probe pass "
            f"({', '.join(matches) or 'the output is changed after the last layer'}; {story}): name it with head=..."
        )
    return matches[0]
