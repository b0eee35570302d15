"""Models from weight files and by name, and weight files that say what they hold."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentError, ArgumentParser
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ttac.classifier import Classifier
from ttac.files import replacing
from ttac.heads import find_head
from ttac.source.networks import ResNet

OWN = {"resnet8": 8, "resnet14": 14, "resnet20": 20, "resnet26": 26}  # name: depth
OWN_OPTIONS = ("width", "stem_stride")
PICKLED = (".pt", ".pth", ".bin")
METADATA_KEY = "ttac"  # alone, because safetensors writes several keys in random order

Build = Callable[[int | None], nn.Module]  # number of classes, None: the architecture's own


@dataclass(frozen=True)
class ModelDescription:
    """What weights need to be used: their network, and the images that it takes.

    >>> ModelDescription.parse(ModelDescription("resnet20", 10, size=(32, 32)).text()).size
    (32, 32)
    """

    arch: str
    num_classes: int
    channels: int = 3
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    size: tuple[int, int] | None = None  # height, width
    classes: tuple[str, ...] | None = None
    crop_pct: float = 1.0
    head: str | None = None
    arch_options: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        if self.num_classes < 1:
            raise ValueError(f"num_classes must be at least 1, not {self.num_classes}")
        if self.classes is not None and len(self.classes) != self.num_classes:
            raise ValueError(f"there are {len(self.classes)} class names for {self.num_classes} classes")
        if self.size is not None and min(self.size) < 1:
            raise ValueError(f"size must be positive, not {self.size}")
        if not 0 < self.crop_pct <= 1:
            raise ValueError(f"crop_pct must be in (0, 1], not {self.crop_pct}")
        # The bound keeps a forged file from asking for more memory than there is.
        if not all(1 <= value <= 256 for value in self.arch_options.values()):
            raise ValueError(f"arch_options must be in 1..256, not {dict(self.arch_options)}")

    def text(self) -> str:
        """Write the description as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def parse(cls, text: str) -> ModelDescription:
        """Read what `text` wrote, or raise a ValueError that names the field."""
        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(cls)
        try:
            values = parser.parse_object(json.loads(text)).as_dict()
        except (ArgumentError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"the description of the model is damaged: {error}") from error
        return cls(**values)


@dataclass(frozen=True)
class LoadedModel:
    """A classifier and the description that it can be saved with."""

    classifier: Classifier
    description: ModelDescription


def save_model(path: Path | str, network: nn.Module, description: ModelDescription) -> None:
    """Write the weights and their description as a safetensors file, atomically."""
    # Cloned, because safetensors refuses weights that share memory.
    weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in network.state_dict().items()}
    with replacing(path) as draft:
        save_file(weights, draft, {METADATA_KEY: description.text()})


def load_model(
    model: str,
    *,
    arch: str | None = None,
    num_classes: int | None = None,
    head: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    device: str = "cpu",
) -> LoadedModel:
    """Load a weights file, or the pretrained timm model of that name.

    A file's architecture is `arch`, or what `save_model` wrote into it: resnet8, 14, 20 or 26 of this package,
    "package.module:callable", a timm name or a torchvision name. What is given here wins over what the file says.
    """
    path = Path(model)
    if path.is_file():
        network, description = _from_file(path, arch, num_classes, head)
    elif path.suffix in (".safetensors", *PICKLED) or len(path.parts) > 1 or path.is_dir():
        raise FileNotFoundError(f"no model file {model}")
    elif arch is not None:
        raise FileNotFoundError(f"no model file {model}: --arch goes with a file of weights")
    else:
        network, description = _pretrained(model)
    try:
        network = network.to(device)
    except (RuntimeError, AssertionError) as error:  # torch has no type of its own for a device that is not there
        raise ValueError(f"device {device!r} cannot be used: {_first_line(error)}") from error
    classifier = Classifier(
        network.eval(),
        head or description.head,
        mean=mean if mean is not None else description.mean,
        std=std if std is not None else description.std,
    )
    return LoadedModel(
        classifier,
        dataclasses.replace(
            description,
            num_classes=classifier.num_classes,
            channels=classifier.channels,
            mean=tuple(classifier.mean.flatten().tolist()),
            std=tuple(classifier.std.flatten().tolist()),
            head=classifier.head_name,
        ),
    )


def _from_file(
    path: Path, arch: str | None, num_classes: int | None, head: str | None
) -> tuple[nn.Module, ModelDescription]:
    weights, described = _read(path)
    if described is not None and described.arch != (arch or described.arch):
        described = dataclasses.replace(described, arch_options={})
    if arch is None:
        if described is None:
            raise ValueError(f"{path} does not say which network its weights are of: name it with --arch")
        arch = described.arch
        if ":" in arch:
            raise ValueError(
                f"{path} is of the network {arch!r}, which is code to import; it is run only where you ask for it: "
                f"add --arch {arch} if you trust it"
            )
    if num_classes is None and described is not None:
        num_classes = described.num_classes
    head = head or (described.head if described is not None else None)
    problems = []
    for origin, build in _architectures(arch, described, weights):
        network = build(num_classes)
        if num_classes is None and (found := _head_rows(network, head, weights)) is not None:
            network = build(found)
        problem = _misfit(network, weights)
        if problem is None:
            network.load_state_dict(weights, strict=False)  # old files lack batch norm's num_batches_tracked
            # 1 stands in: `load_model` reads the number of classes off the classifier.
            return network, dataclasses.replace(described or ModelDescription(arch, 1), arch=arch)
        problems.append(f"{arch} of {origin}: {problem}")
    raise ValueError(f"the weights in {path} do not fit {'; '.join(problems)}")


def _read(path: Path) -> tuple[dict[str, Tensor], ModelDescription | None]:
    """Read weights without ever unpickling objects."""
    described = None
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, "pt") as file:
                text = (file.metadata() or {}).get(METADATA_KEY)
                content: Any = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        except SafetensorError as error:
            raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
        if text is not None:
            try:
                described = ModelDescription.parse(text)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
    elif path.suffix in PICKLED:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged or forged file fails wherever it likes
            raise ValueError(
                f"{path} is damaged, or holds more than weights and was not loaded, because that could run code: "
                f"save model.state_dict() alone, best as safetensors ({_first_line(error)})"
            ) from error
    else:
        raise ValueError(f"{path}: weights are read from .safetensors, {', '.join(PICKLED)} files")
    return _plain_weights(content, path), described


def _plain_weights(content: Any, path: Path) -> dict[str, Tensor]:
    """Take the state dict out of usual wrappers, and what wrapped the model out of its names."""
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content:
        raise ValueError(f"{path} holds no state dict (name: tensor); save model.state_dict()")
    odd = [str(name) for name, value in content.items() if not (isinstance(name, str) and isinstance(value, Tensor))]
    if odd:
        raise ValueError(f"{path} holds more than tensors ({', '.join(odd[:3])}); save model.state_dict()")
    weights: dict[str, Tensor] = dict(content)
    for prefix in ("module.", "_orig_mod."):  # of DataParallel and of torch.compile
        if all(name.startswith(prefix) for name in weights):
            weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    bad = [name for name, tensor in weights.items() if not bool(tensor.isfinite().all())]
    if bad:
        raise ValueError(f"{path}: NaN or infinity in {', '.join(bad[:3])}")
    return weights


def _architectures(
    arch: str, described: ModelDescription | None, weights: Mapping[str, Tensor]
) -> Iterator[tuple[str, Build]]:
    """Yield everything that has the name, with where it comes from; timm and torchvision share many names."""
    options = dict(described.arch_options) if described is not None else {}
    unknown = [name for name in options if arch not in OWN or name not in OWN_OPTIONS]
    if unknown:
        raise ValueError(f"{arch} has no option {', '.join(unknown)}; only {', '.join(OWN)} have options")
    if arch in OWN:
        yield "ttac", _own(OWN[arch], options, weights.get("conv1.weight"))
        return
    if ":" in arch:
        yield "its own module", _factory(arch)
        return
    channels = described.channels if described is not None else 3
    (timm, no_timm), (torchvision, no_torchvision) = _optional("timm"), _optional("torchvision")
    in_timm = timm is not None and timm.is_model(arch)
    if in_timm:
        yield "timm", lambda count: timm.create_model(arch, in_chans=channels, **_count(count))
    in_torchvision = torchvision is not None and arch in torchvision.models.list_models(module=torchvision.models)
    if in_torchvision:
        yield "torchvision", lambda count: torchvision.models.get_model(arch, **_count(count))
    if not in_timm and not in_torchvision:
        raise ValueError(
            f"unknown architecture {arch!r}: neither {', '.join(OWN)}, nor package.module:callable, "
            f"{no_timm or 'nor a timm name'}, {no_torchvision or 'nor a torchvision name'}{_close(arch, timm)}"
        )


def _count(num_classes: int | None) -> dict[str, int]:
    return {} if num_classes is None else {"num_classes": num_classes}


def _own(depth: int, options: Mapping[str, int], stem: Tensor | None) -> Build:
    width, channels = stem.shape[:2] if stem is not None and stem.ndim == 4 else (16, 3)
    width, stem_stride = options.get("width", width), options.get("stem_stride", 1)
    return lambda count: ResNet(depth, count or 10, channels=channels, width=width, stem_stride=stem_stride)


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


def _head_rows(network: nn.Module, head: str | None, weights: Mapping[str, Tensor]) -> int | None:
    """Read the number of classes off the weights of the head."""
    weight = weights.get(f"{find_head(network, head)}.weight")
    return None if weight is None else len(weight)


def _misfit(network: nn.Module, weights: Mapping[str, Tensor]) -> str | None:
    """Say where names or shapes differ, None where they fit."""
    expected = network.state_dict()
    lists = {
        "missing": [n for n in expected if n not in weights and not n.endswith("num_batches_tracked")],
        "unexpected": [n for n in weights if n not in expected],
        "of another shape": [
            f"{name} {tuple(weights[name].shape)} for {tuple(tensor.shape)}"
            for name, tensor in expected.items()
            if name in weights and weights[name].shape != tensor.shape
        ],
    }
    parts = [
        f"{len(names)} {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for what, names in lists.items()
        if names
    ]
    return ", ".join(parts) or None


def _pretrained(name: str) -> tuple[nn.Module, ModelDescription]:
    timm, problem = _optional("timm")
    if timm is None:
        raise ValueError(f"no model file {name}, and it cannot be looked up as a timm name: {problem}")
    if not timm.is_model(name):
        raise ValueError(f"no model file {name}, and no timm model of that name{_close(name, timm)}")
    try:
        network = timm.create_model(name, pretrained=True)
    except Exception as error:  # of several network libraries, with no base in common
        raise ValueError(
            f"the weights of {name} could not be had: {error}. Without a network, use --model FILE --arch {name}"
        ) from error
    config = timm.data.resolve_model_data_config(network, use_test_size=True)
    _, height, width = config["input_size"]
    return network, ModelDescription(name, network.num_classes, size=(height, width), crop_pct=config["crop_pct"])


def _optional(name: str) -> tuple[Any, str]:
    """Import a package that need not be there; None and the reason where that fails."""
    try:
        return importlib.import_module(name), ""
    except ImportError:
        return None, f"{name} is not installed (pip install {name})"
    except RuntimeError as error:  # a torchvision that was built for another torch
        return None, f"{name} is installed but cannot be imported ({error})"


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0][:200]


def _close(name: str, timm: Any) -> str:
    close = difflib.get_close_matches(name, timm.list_models(), n=3) if timm is not None else []
    return f"; did you mean {' or '.join(close)}?" if close else ""
