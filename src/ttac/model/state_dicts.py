"""Weights in files of all kinds, and under all the names that wrappers give them; nothing in a file is run unasked."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ttac.common.lookup import some
from ttac.model.tensors import check_finite, read_tensors

SUFFIXES = (".safetensors", ".pt", ".pth", ".pth.tar", ".ckpt", ".bin")
# Of DataParallel, Lightning modules and training scripts, and torch.compile; also nested.
PREFIXES = ("module.", "model.", "net.", "_orig_mod.")
MOST_PREFIXES = 4
# Keys of checkpoints that hold a state dict, or the model itself, beside other things.
WRAPPERS = ("state_dict", "model_state_dict", "model", "net")


@dataclass(frozen=True)
class StateDict:
    """Tensors by name, and what was taken off the names in the file."""

    tensors: Mapping[str, Tensor]
    prefix: str = ""
    left_out: tuple[str, ...] = ()  # names in the file that do not begin with the prefix

    def notes(self) -> tuple[str, ...]:
        """Say what was changed on the way from the file, in words for a user."""
        if not self.prefix:
            return ()
        said = f"stripped {self.prefix!r} from the names of the weights"
        left_out = f"; left out what is not under it: {some(self.left_out, 5)}" if self.left_out else ""
        return (said + left_out,)

    def readings(self) -> Iterator[StateDict]:
        """Give these tensors as they are, and under each of the usual prefixes that names begin with, also nested.

        >>> weights = StateDict({"module.model.fc.bias": torch.zeros(2), "loss.weight": torch.zeros(2)})
        >>> [(reading.prefix, list(reading.tensors)[0]) for reading in weights.readings()]
        [('', 'module.model.fc.bias'), ('module.', 'model.fc.bias'), ('module.model.', 'fc.bias')]
        """
        yield self
        if self.prefix.count(".") == MOST_PREFIXES:
            return
        for prefix in PREFIXES:
            inner = {
                name.removeprefix(prefix): value for name, value in self.tensors.items() if name.startswith(prefix)
            }
            if inner:
                others = tuple(self.prefix + name for name in self.tensors if not name.startswith(prefix))
                yield from StateDict(inner, self.prefix + prefix, (*self.left_out, *others)).readings()

    def read_for(self, network: nn.Module) -> StateDict:
        """Choose the reading that has most names in common with a network, the plainest of those."""
        expected = network.state_dict().keys()
        return max(self.readings(), key=lambda reading: len(expected & reading.tensors.keys()))


def is_weights_file(name: str) -> bool:
    """Whether a name is one of a file that can be read.

    >>> is_weights_file("last.ckpt"), is_weights_file("best.PTH.TAR"), is_weights_file("resnet18.a1_in1k")
    (True, True, False)
    """
    return name.lower().endswith(SUFFIXES)


def read_file(path: Path, *, trust_pickle: bool = False) -> tuple[StateDict | nn.Module, dict[str, str]]:
    """Read a state dict and the notes of its file, or a whole module where pickles are trusted."""
    notes: dict[str, str] = {}
    content: Any
    _refuse_programs(path)
    if path.suffix.lower() == ".safetensors":
        content, notes = read_tensors(path)
    elif is_weights_file(path.name):
        content = _unpickled(path, trust_pickle)
    else:
        raise ValueError(f"{path}: weights are read from {', '.join(SUFFIXES)} files")
    for key in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping | nn.Module):
            content = content[key]
    if isinstance(content, nn.Module):
        check_finite(content.state_dict(), path)
        return content, notes
    if not isinstance(content, Mapping) or not content:
        raise ValueError(f"{path} holds no state dict (name: tensor); save model.state_dict()")
    odd = [str(name) for name, value in content.items() if not (isinstance(name, str) and isinstance(value, Tensor))]
    if odd:
        raise ValueError(f"{path} holds more than tensors ({some(odd, 3)}); save model.state_dict()")
    check_finite(content, path)
    return StateDict(dict(content)), notes


def _refuse_programs(path: Path) -> None:
    """Refuse networks that were saved as programs, which no longer have what adaptation changes."""
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except zipfile.BadZipFile:
        return  # whoever reads it says what is wrong
    last = {name.rpartition("/")[2] for name in names}
    if path.suffix.lower() == ".pt2" or last & {"archive_format", "serialized_exported_program.json"}:
        kind, reason = "a torch.export program", "its graph is fixed in eval mode"
    elif "constants.pkl" in last and any("code/" in name for name in names):
        kind, reason = "a TorchScript program", "its code is compiled"
    else:
        return
    raise ValueError(
        f"{path} is {kind}, which cannot be adapted: {reason}, so that layers cannot be found, trained or set to their "
        "own batch statistics. Save the state_dict() of the model that it was made from, and name that with --arch"
    )


def _unpickled(path: Path, trust_pickle: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=not trust_pickle)
    except Exception as error:  # a damaged or forged file fails wherever it likes
        if trust_pickle:
            raise ValueError(f"{path} could not be unpickled: {type(error).__name__}: {error}") from error
        found = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it holds {found[1]}" if found else str(error).partition("\n")[0][:200]
        raise ValueError(
            f"{path} is damaged, or holds more than weights and was not loaded, because that could run code "
            f"({reason}): save model.state_dict() alone, best as safetensors, or say --trust-pickle "
            "(trust_pickle=True in Python) if you trust who made it"
        ) from error
