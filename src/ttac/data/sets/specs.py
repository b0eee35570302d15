"""The data sets by name: their files, sizes, classes and normalisation, which specs.yaml holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ttac.common.lookup import pick
from ttac.data.sets.spec import DatasetSpec, RemoteFile


def get_spec(name: str) -> DatasetSpec:
    """Give the data set of a name, or raise an error that suggests one.

    >>> get_spec("cifar10").num_classes
    10
    """
    return pick(name, SPECS, "data set")


def _spec(name: str, fields: dict[str, Any]) -> DatasetSpec:
    files = [RemoteFile(**file) for file in fields.get("files", ())]
    plain: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    return DatasetSpec(name, **{**plain, "files": tuple(files)})


_CONTENT = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
SPECS: dict[str, DatasetSpec] = {name: _spec(name, fields) for name, fields in _CONTENT.items()}
