"""Tensors by name: written to and read from safetensors files, and hashed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ttac.common.files import replacing
from ttac.common.lookup import some


def write_tensors(path: Path | str, tensors: Mapping[str, Tensor], notes: dict[str, str] | None = None) -> None:
    """Write a safetensors file with notes, atomically."""
    # Cloned, because safetensors refuses tensors that share memory.
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    content = save(plain, notes)
    with replacing(path) as draft:  # by Python, whose errors say of a disk what those of safetensors do not
        draft.write_bytes(content)


def read_tensors(path: Path, device: str = "cpu") -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors and the notes of a safetensors file, or raise an error that names it."""
    try:
        with safe_open(path, "pt", device) as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error


def check_finite(tensors: Mapping[str, Tensor], origin: object) -> None:
    """Raise an error that names tensors with NaN or infinity, and where they are from."""
    bad = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
    if bad:
        raise ValueError(f"{origin}: NaN or infinity in {some(bad, 3)}")


def hash_tensors(start: str, tensors: Mapping[str, Tensor]) -> str:
    """Hash a text and tensors, the same on every device.

    >>> hash_tensors("", {"a": torch.zeros(2)}) == hash_tensors("", {"a": torch.zeros(3)})
    False
    """
    digest = hashlib.sha256(start.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]
