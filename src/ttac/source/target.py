"""Data that a model is tried on, as it takes them."""

from __future__ import annotations

import dataclasses

from ttac.data.labelled import LabelledImages
from ttac.data.sets import DataSet
from ttac.source.classes import in_order_of
from ttac.source.weights import LoadedModel


def read_for(
    model: LoadedModel, found: DataSet, split: str | None, *, domain: str | None = None, severity: int | None = None
) -> LabelledImages:
    """Read a part of a data set with the size and channels that the model takes, and labels in its class order."""
    wanted, takes = model.description, model.classifier
    data = found.read(
        split,
        domain=domain,
        severity=severity,
        size=wanted.size,
        channels=takes.channels,
        crop_pct=wanted.crop_pct,
        classes=wanted.classes if found.spec is None else None,  # a folder need not have images of every class
    )
    if found.spec is not None:
        data, _ = in_order_of(model, data, None)
    if data.channels != takes.channels:
        raise ValueError(f"the images have {data.channels} channels, the model takes {takes.channels}")
    # Labels without names are the model's own numbers, of which the last ones may be missing.
    if data.num_classes > takes.num_classes or (data.classes is not None and data.num_classes < takes.num_classes):
        hint = ": name those of the model with --classes" if wanted.classes is None else ""
        raise ValueError(f"the data have {data.num_classes} classes, the model has {takes.num_classes}{hint}")
    return dataclasses.replace(data, num_classes=takes.num_classes)
