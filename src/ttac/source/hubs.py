"""Pretrained networks by the names of timm, torchvision and Hugging Face, and the preprocessing they come with."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import torch
from torch import nn

from ttac.common.imports import optional_package
from ttac.common.lookup import suggestion
from ttac.model.architectures import TIMM_OPTIONS, TORCHVISION, TORCHVISION_OPTIONS, TRANSFORMERS
from ttac.model.pixels import pretrained_config
from ttac.model.processors import read_processor
from ttac.model.weights import KnownNetwork, ModelDescription

Made = TypeVar("Made")
HUB_PREFIXES = ("hf_hub:", "hf-hub:")  # as timm has them
PATIENCE = 3.0  # seconds until a server counts as out of reach
CONFIG = "config.json"


def from_timm(name: str, *, folder: Path | None = None) -> KnownNetwork:
    """Get a pretrained model of timm by its name, `hf_hub:owner/name`, or from a folder that timm saved."""
    timm = _required("timm", name)
    on_hub = name.startswith(HUB_PREFIXES)

    def load() -> tuple[nn.Module, Mapping[str, Any]]:
        made_with: Mapping[str, Any] = {}
        if on_hub:
            _, _, made_with = timm.models.load_model_config_from_hf(name.partition(":")[2])
        elif folder is not None:
            made_with = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("model_args") or {}
        source = name if folder is None else f"local-dir:{folder}"
        return timm.create_model(source, pretrained=True), made_with or {}

    network, made_with = _fetched(name, load)
    config = timm.data.resolve_model_data_config(network, use_test_size=True)
    _, height, width = config["input_size"]
    known = pretrained_config(network)
    labels, num_classes = known.get("label_names"), int(network.num_classes)  # type: ignore[arg-type]
    description = ModelDescription(
        str(known["architecture"]) if on_hub or folder is not None else name,
        num_classes,
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        size=(height, width),
        crop_pct=config["crop_pct"],
        classes=tuple(map(str, labels)) if labels and len(labels) == num_classes else None,
        config={option: made_with[option] for option in TIMM_OPTIONS if option in made_with},
    )
    return KnownNetwork(network, description)


def from_torchvision(name: str, weights: str) -> KnownNetwork:
    """Get a model of torchvision with weights of its enumeration, and their transforms and class names."""
    torchvision = _required("torchvision", f"{name}:{weights}")
    if name not in (names := torchvision.models.list_models(module=torchvision.models)):
        raise ValueError(f"torchvision has no classifier {name!r}{suggestion(name, names)}")
    entries = torchvision.models.get_model_weights(name).__members__
    if weights not in entries:
        raise ValueError(f"{name} of torchvision has no weights {weights!r}: name one of {', '.join(entries)}")
    entry = entries[weights]
    cached = Path(torch.hub.get_dir()) / "checkpoints" / Path(urlsplit(entry.url).path).name
    if not cached.exists() and not reachable(entry.url):
        raise _unreachable(f"{name}:{weights}", f"{urlsplit(entry.url).hostname} cannot be reached", cached.parent)
    try:
        network = torchvision.models.get_model(name, weights=entry)
    except (OSError, RuntimeError) as error:  # of the download, and of its check sum
        raise _unreachable(f"{name}:{weights}", _short(error), cached.parent) from error
    transforms = entry.transforms()
    side, over = transforms.crop_size[0], transforms.resize_size[0]
    classes = tuple(entry.meta["categories"])
    description = ModelDescription(
        TORCHVISION + name,
        len(classes),
        mean=tuple(transforms.mean),
        std=tuple(transforms.std),
        size=(side, side),
        crop_pct=side / over,
        classes=classes,
        # With pretrained weights, GoogLeNet and Inception are made with others than without.
        config={option: getattr(network, option) for option in TORCHVISION_OPTIONS if hasattr(network, option)},
    )
    return KnownNetwork(network, description)


def from_transformers(name: str) -> KnownNetwork:
    """Get an image classifier of Hugging Face by its id or folder, with its image processor and label names."""
    transformers = _required("transformers", name)

    def load() -> tuple[nn.Module, Any]:
        model = transformers.AutoModelForImageClassification.from_pretrained(name, trust_remote_code=False)
        return model, transformers.AutoImageProcessor.from_pretrained(name, trust_remote_code=False)

    network, processor = _fetched(name, load)
    config: Any = network.config
    if config.model_type == "timm_wrapper":
        raise ValueError(f"{name} is a model of timm: name it hf_hub:{name}")
    pixels, size, crop_pct = read_processor(processor)
    labels = tuple(str(config.id2label[number]) for number in range(config.num_labels))
    unnamed = labels == tuple(f"LABEL_{number}" for number in range(len(labels)))
    plain = json.loads(config.to_json_string(use_diff=True))
    plain.pop("model_type")
    description = ModelDescription(
        TRANSFORMERS + config.model_type,
        len(labels),
        mean=pixels.mean,
        std=pixels.std,
        size=size,
        crop_pct=crop_pct,
        classes=None if unnamed else labels,
        config=plain,
    )
    return KnownNetwork(network, description)


def from_folder(folder: Path) -> KnownNetwork:
    """Get the model of a folder that `save_pretrained` of transformers or timm's `save_for_hf` wrote."""
    try:
        content = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{folder / CONFIG} is damaged: {error}") from error
    if isinstance(content, Mapping) and "architecture" in content:
        return from_timm(str(folder), folder=folder)
    return from_transformers(str(folder))


def reachable(url: str, seconds: float = PATIENCE) -> bool:
    """Whether a server, or the proxy on the way to it, takes connections; looking its name up is bounded too."""
    parts, proxies = urlsplit(url), getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy and not proxy_bypass(parts.hostname or ""):
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    answered = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection((parts.hostname or "", port), seconds).close()
        except OSError:
            return
        answered.set()

    attempt = threading.Thread(target=connect, daemon=True)
    attempt.start()
    attempt.join(seconds)
    return answered.is_set()


@contextmanager
def _from_cache_where_offline() -> Iterator[str]:
    """Let libraries take what is cached where the hub is out of reach: their own attempts last a minute."""
    hub, _ = optional_package("huggingface_hub.constants")
    if hub is None:
        yield ""
        return
    before = hub.HF_HUB_OFFLINE
    hub.HF_HUB_OFFLINE = before or not reachable(hub.ENDPOINT)
    reason = "HF_HUB_OFFLINE is set" if before else f"{urlsplit(hub.ENDPOINT).hostname} cannot be reached"
    try:
        yield reason if hub.HF_HUB_OFFLINE else ""
    finally:
        hub.HF_HUB_OFFLINE = before


def _fetched(name: str, load: Callable[[], Made]) -> Made:
    """Load from a folder, a cache or the network, or say what to do."""
    if Path(name).is_dir():
        try:
            return load()
        except Exception as error:  # of several libraries, with no base in common
            raise ValueError(f"{name} could not be loaded ({_short(error)})") from error
    with _from_cache_where_offline() as problem:
        try:
            return load()
        except Exception as error:
            raise _unreachable(name, problem or _short(error), Path("~/.cache/huggingface")) from error


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"


def _unreachable(name: str, reason: str, cache: Path) -> ValueError:
    return ValueError(
        f"{name} could not be loaded ({reason}). Where there is a network, the same command fills {cache}, which can "
        "be copied; or save the weights there and use --model FILE --arch NAME"
    )


def _required(package: str, name: str) -> Any:
    found, problem = optional_package(package)
    if found is None:
        raise ValueError(f"no model file {name}, and it cannot be looked up by name: {problem}")
    return found
