"""The classes of data: in the order of the model that they are for, and for training every one with images."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from ttac.common.lookup import some
from ttac.data.labelled import LabelledImages
from ttac.model.weights import LoadedModel


def in_order_of(
    names: tuple[str, ...] | None, data: LabelledImages, held: LabelledImages | None
) -> tuple[LabelledImages, LabelledImages | None]:
    """Number the classes of the data as a model numbers these names; `held`, to validate on, is numbered as `data`.

    Data without names take those of the model. Where the number of classes differs, the head is to be replaced and
    the data stay as they are; other classes of the same number are refused, as the trained head would confuse them.
    """
    if names is None or len(names) != data.num_classes:
        return data, held
    given = data.classes or names
    if sorted(given) != sorted(names):
        same = "another number of the same"
        news, olds = sorted(set(given) - set(names)), sorted(set(names) - set(given))
        raise ValueError(
            f"the classes of the data are not those of the model ({some(news) or same} instead of "
            f"{some(olds) or same}), whose head would take the ones for the others: rename them, or use a file of the "
            "weights without class names (save model.state_dict())"
        )
    numbers = torch.empty(len(names), dtype=torch.long)
    # Sorting is stable, so that names which occur twice are matched one by one.
    old, new = (sorted(range(len(names)), key=order.__getitem__) for order in (given, names))
    numbers[old] = torch.tensor(new)

    def renumbered(part: LabelledImages) -> LabelledImages:
        return dataclasses.replace(part, labels=numbers[part.labels], num_classes=len(names), classes=names)

    return renumbered(data), None if held is None else renumbered(held)


def check_every_class_is_there(data: LabelledImages) -> None:
    """Raise an error that names the classes without an image: statistics of the source need one of each."""
    missing = (data.labels.bincount(minlength=data.num_classes) == 0).nonzero().flatten().tolist()
    if missing:
        names = [str(number) if data.classes is None else data.classes[number] for number in missing]
        raise ValueError(
            f"there is no image to train on of class {some(names)}: add some, keep fewer for validation (--val), or "
            "leave --stats out, as every class needs an anchor"
        )


def replace_head(model: LoadedModel, num_classes: int) -> None:
    """Put an untrained head for other classes in the place of the trained one."""
    owner, _, name = model.classifier.head_name.rpartition(".")
    width, has_bias = model.classifier.feature_dim, model.classifier.head.bias is not None
    linear = isinstance(model.classifier.head, nn.Linear)
    head = nn.Linear(width, num_classes, has_bias) if linear else nn.Conv2d(width, num_classes, 1, bias=has_bias)
    setattr(model.classifier.model.get_submodule(owner), name, head)
