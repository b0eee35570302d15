"""Pickles of plain values and arrays of bytes, read without letting them run anything."""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np

MAX_BYTES = 512 * 2**20  # CIFAR-100's largest file has 155 million
MAX_OBJECTS = 2**20  # of which it has 0.2 million; one byte of a pickle can make one of 216 bytes


class _Octets(np.ndarray):
    """An array of bytes, whatever else its file says that it is: a forged type could be one of pointers."""

    def __setstate__(self, state: Any) -> None:
        version, shape, _, fortran, raw = state
        super().__setstate__((version, shape, np.dtype(np.uint8), fortran, raw))


class _DType:
    """Stands for a `numpy.dtype`, which is not looked at."""

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, _: object) -> None: ...


def _new_array(*_: object) -> _Octets:
    return _Octets(0, np.uint8)


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _new_array,
    ("numpy._core.multiarray", "_reconstruct"): _new_array,
    ("numpy", "ndarray"): None,  # named in the call of the above
    ("numpy", "dtype"): _DType,
}


class _PlainUnpickler(pickle.Unpickler):
    """Knows plain values and arrays of bytes; any other name is refused before it is looked up."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="latin1")
        self._left = len(content)

    def _encode(self, text: str, _: str) -> bytes:
        """Make bytes of the text by which Python 3 writes them for Python 2, always in latin1, of each text once."""
        self._left -= len(text)
        if self._left < 0:
            raise pickle.UnpicklingError("it asks for more bytes than it has")
        return text.encode("latin1")

    def find_class(self, module: str, name: str) -> Any:
        """Give what a name stands for, or refuse it."""
        if (module, name) == ("_codecs", "encode"):
            return self._encode
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which images and labels do not need")
        return _ALLOWED[module, name]


def _check_objects(content: bytes) -> None:
    """Refuse a pickle of too many objects, or one that asks for a long table to remember them in."""
    for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if number == MAX_OBJECTS or (opcode.name.endswith("PUT") and (argument or 0) > MAX_OBJECTS):
            raise pickle.UnpicklingError(f"it has more than {MAX_OBJECTS} objects")


def load_plain(path: Path) -> Any:
    """Load a pickle of plain values and arrays of bytes, or raise an error that names the file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a").write_bytes(pickle.dumps({"labels": [1, 2]}))
    ...     load_plain(Path(folder, "a"))
    {'labels': [1, 2]}
    """
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, at most {MAX_BYTES} are read")
    try:
        content = path.read_bytes()
        _check_objects(content)
        return _PlainUnpickler(content).load()
    except Exception as error:  # a damaged or forged file fails wherever it likes
        raise ValueError(f"{path} is damaged or not what its name says: {error}") from error
