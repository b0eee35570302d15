"""Gaussians by name as a file keeps them: parts of statistics, some of them of depths with names of any kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ttac.gaussian import FAMILIES, Gaussians
from ttac.model.tensors import check_finite

DEPTHS = "depths."  # what the names of depths begin with among those of parts


def by_field(parts: Mapping[str, Gaussians]) -> dict[str, Any]:
    """Put the Gaussians of depths, whatever their names, into one field."""
    depths = {name.removeprefix(DEPTHS): part for name, part in parts.items() if name.startswith(DEPTHS)}
    return {"depths": depths, **{name: part for name, part in parts.items() if not name.startswith(DEPTHS)}}


def tensors_of(parts: Mapping[str, Gaussians]) -> dict[str, Tensor]:
    """Name the tensors of all parts for a file."""
    return {
        f"{part}.{name}": tensor
        for part, gaussians in parts.items()
        for name, tensor in {"mean": gaussians.mean, **gaussians.covariance.tensors()}.items()
    }


def read_parts(tensors: Mapping[str, Tensor], families: Mapping[str, str]) -> dict[str, Gaussians]:
    """Undo `tensors_of`, or raise an error where the tensors make no Gaussians of these families."""
    return {part: _read_gaussians(tensors, part, family) for part, family in families.items()}


def check_depths(depths: Mapping[str, Gaussians], floors: Mapping[str, float]) -> None:
    """Refuse what a forged file says of depths."""
    for name, depth in depths.items():
        if len(depth.mean) != 1 or depth.covariance.family not in ("full", "diagonal"):
            raise ValueError(f"{DEPTHS}{name}: expected one Gaussian, full or diagonal")
    for name, floor in floors.items():
        if name not in (*depths, "classes", "overall") or not isinstance(floor, float) or not 0 <= floor < float("inf"):
            raise ValueError(f"floors: expected a number for a depth or for anchors, not {floor!r} for {name!r}")


def _read_gaussians(tensors: Mapping[str, Tensor], part: str, family: str) -> Gaussians:
    stored = {name.removeprefix(f"{part}."): tensor for name, tensor in tensors.items() if name.startswith(f"{part}.")}
    mean = stored.pop("mean")
    covariance = FAMILIES[family](**stored)
    # One matrix is written out whole, as the diagonal does not tell whether it is square.
    count, dim = mean.shape
    fits = covariance.diagonal().shape == mean.shape and all(len(t) == count for t in stored.values() if t.ndim)
    if not fits or covariance.rows(torch.tensor([0])).dense().shape != (1, dim, dim) or not mean.is_floating_point():
        raise ValueError(f"{part}: mean {tuple(mean.shape)} and covariance do not fit each other")
    check_finite({"mean": mean, **stored}, part)
    return Gaussians(mean, covariance)
