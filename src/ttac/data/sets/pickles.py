"""Pickles of plain values and numpy arrays, read without letting them run anything."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np


class _ArrayType:
    """Stands for `numpy.ndarray`, which pickles name but need not call."""

    __slots__ = ()  # nothing that a pickle could set


class _NewArray:
    """Stands for numpy's `_reconstruct`: an empty array, which the pickle then fills."""

    __slots__ = ()

    def __call__(self, *_: object) -> np.ndarray:
        return np.empty(0, np.int8)


class _Encode:
    """Stands for `_codecs.encode`, by which Python 3 writes bytes for Python 2."""

    __slots__ = ()

    def __call__(self, text: str, encoding: str = "latin1") -> bytes:
        if encoding not in ("latin1", "latin-1"):
            raise pickle.UnpicklingError(f"bytes are encoded as {encoding!r}")
        return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _NewArray(),
    ("numpy._core.multiarray", "_reconstruct"): _NewArray(),
    ("numpy", "ndarray"): _ArrayType(),
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _Encode(),
}


class _PlainUnpickler(pickle.Unpickler):
    """Knows dictionaries, lists, texts, bytes, numbers and arrays; any other name is refused before it is looked up."""

    def find_class(self, module: str, name: str) -> Any:
        """Give a harmless stand-in for a name, or refuse it."""
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which images and labels do not need")
        return _ALLOWED[module, name]


def load_plain(path: Path) -> Any:
    """Load a pickle of plain values and arrays, or raise an error that names the file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a").write_bytes(pickle.dumps({"labels": [1, 2]}))
    ...     load_plain(Path(folder, "a"))
    {'labels': [1, 2]}
    """
    with path.open("rb") as file:
        try:
            return _PlainUnpickler(file, encoding="latin1").load()
        except Exception as error:  # a damaged or forged file fails wherever it likes
            raise ValueError(f"{path} is damaged or not what its name says: {error}") from error
