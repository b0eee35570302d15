"""Models by what a user calls them: a bundle, a file of weights, or the name or folder of a pretrained network."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from ttac.common.imports import optional_package
from ttac.common.lookup import suggestion
from ttac.model.speed import Speed
from ttac.model.state_dicts import is_weights_file
from ttac.model.weights import KnownNetwork, LoadedModel, ModelDescription, classifier_of, read_weights, save_model
from ttac.source.bundle import DESCRIPTION, load_bundle
from ttac.source.hubs import CONFIG, HUB_PREFIXES, from_folder, from_timm, from_torchvision, from_transformers

__all__ = ["LoadedModel", "ModelDescription", "load_model", "save_model"]


def load_model(
    model: str | Path,
    arch: str | None = None,
    *,
    num_classes: int | None = None,
    head: str | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    device: str = "cpu",
    trust_pickle: bool = False,
    speed: Speed | None = None,
) -> LoadedModel:
    """Load a model with its preprocessing: `.classifier`, and a `.description` with size, class names and more.

    `model` is the folder of a bundle (which gives a `Bundle`); a file of weights, whose network is `arch` or what
    `save_model` wrote into it; a timm name or `hf_hub:owner/name`; a torchvision name with its weights,
    `resnet50:IMAGENET1K_V2`; or the id or folder of a Hugging Face image classifier. `arch` names a network of this
    package, of timm or of torchvision, or one to import: `package.module:callable`, `path/to/file.py:callable`.

    What is given here wins over what the model says of itself, but for a bundle, which is taken as it is. Files are
    read as weights alone; `trust_pickle` runs whatever a pickled module holds. `speed` says how the model is run, see
    `Classifier.tuned`. docs/own-model.md has an example of each.
    """
    path, name = Path(model), str(model)
    if path.is_dir() and ((path / DESCRIPTION).is_file() or not (path / CONFIG).is_file()):
        given = {"num_classes": num_classes, "--head": head, "--mean": mean, "--std": std}
        odd = [option for option, value in given.items() if value is not None]
        if odd:
            raise ValueError(f"{name} is a bundle, which says these itself: leave {', '.join(odd)} out")
        loaded: LoadedModel = load_bundle(path, arch=arch, device=device)
    else:
        if path.is_file():
            known = read_weights(path, arch, num_classes, trust_pickle=trust_pickle)
        elif arch is not None:
            raise FileNotFoundError(f"no model file {name}: --arch goes with a file of weights")
        else:
            known = from_folder(path) if path.is_dir() else _named(name)
        loaded = classifier_of(*known, head=head, mean=mean, std=std, device=device)
    if speed is None or speed == Speed():
        return loaded
    return dataclasses.replace(loaded, classifier=loaded.classifier.tuned(**vars(speed)))


def _named(name: str) -> KnownNetwork:
    """Get the pretrained model of a name, or say what was meant where it looks like a file's."""
    if name.startswith(HUB_PREFIXES):
        return from_timm(name)
    owner, slash, repository = name.partition("/")
    on_disk = slash and (not owner.strip("~.") or not repository or "/" in repository)
    if is_weights_file(name) or on_disk or Path(name).is_absolute():
        raise FileNotFoundError(f"no model file {name}" + (", nor a bundle" if not is_weights_file(name) else ""))
    if ":" in name:
        return from_torchvision(*name.split(":", 1))
    if slash:
        return from_timm(f"{HUB_PREFIXES[0]}{name}") if owner == "timm" else from_transformers(name)
    timm, problem = optional_package("timm")
    if timm is not None and timm.is_model(name):
        return from_timm(name)
    torchvision, _ = optional_package("torchvision")
    if torchvision is not None and name in torchvision.models.list_models(module=torchvision.models):
        entries = [f"{name}:{entry.name}" for entry in torchvision.models.get_model_weights(name)]
        raise ValueError(f"{name} is a network of torchvision: name its weights too, {' or '.join(entries)}")
    if timm is None:
        raise ValueError(f"no model file {name}, and it cannot be looked up as a timm name: {problem}")
    raise ValueError(f"no model file {name}, and no timm model of that name{suggestion(name, timm.list_models())}")
