"""Pickles of plain values and numpy arrays, read without letting them run anything or touch numpy's own objects."""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

MAX_BYTES = 512 * 2**20  # CIFAR-100's largest file has 155 million
MAX_STEPS = 1_000_000  # opcodes, and places in the memo; the same file needs a fifth
CODES = ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8")
ORDERS = ("|", "=", "<", ">")
# Those of protocols 0 to 4 that make plain values and call what is allowed.
OPCODES = """
    PROTO FRAME STOP MARK PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD
    NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING
    UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8
    EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT DICT SETITEM SETITEMS
"""


class _StandIn:
    """An object that a pickle may name, and whose attributes it may not set."""

    def __setstate__(self, _: object) -> None:
        raise pickle.UnpicklingError("it changes what it should use")


class _ArrayType(_StandIn):
    """Stands for `numpy.ndarray`, which pickles name but need not call."""


class _Array(_StandIn):
    """Stands for an array that the pickle then fills."""

    values: np.ndarray | None = None

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            _refuse_array()
        _, shape, dtype, fortran, raw = state
        if isinstance(raw, str):  # bytes of Python 2
            raw = raw.encode("latin1")
        if not isinstance(shape, tuple) or not all(type(length) is int and length >= 0 for length in shape):
            _refuse_array()
        if not isinstance(dtype, _DType) or not isinstance(raw, bytes):
            _refuse_array()
        kind = np.dtype(dtype.order + dtype.code)
        if len(raw) != math.prod(shape) * kind.itemsize:
            _refuse_array()
        self.values = np.frombuffer(raw, kind).reshape(shape, order="F" if fortran is True else "C")


class _DType(_StandIn):
    """Stands for a `numpy.dtype` of whole numbers; a real one could be turned into one of pointers."""

    def __init__(self, code: str, order: str) -> None:
        self.code, self.order = code, order

    def __setstate__(self, state: object) -> None:
        """Take the byte order from (version, order, subarray, names, fields, ...)."""
        if not isinstance(state, tuple) or len(state) < 5 or any(part is not None for part in state[2:5]):
            _refuse_array()
        if not isinstance(state[1], str) or state[1] not in ORDERS:
            _refuse_array()
        self.order = state[1]


def _refuse_array() -> NoReturn:
    raise pickle.UnpicklingError("it has an array that is not one of whole numbers, or not whole")


class _NewArray(_StandIn):
    """Stands for numpy's `_reconstruct`."""

    def __call__(self, *_: object) -> _Array:
        return _Array()


class _NewDType(_StandIn):
    """Stands for the call of `numpy.dtype`."""

    def __call__(self, code: object, *_: object) -> _DType:
        if not isinstance(code, str) or code.lstrip("".join(ORDERS)) not in CODES or len(code) > 3:
            _refuse_array()
        return _DType(code[-2:], code[:-2] or "=")


class _Encode(_StandIn):
    """Stands for `_codecs.encode`, by which Python 3 writes bytes for Python 2."""

    def __init__(self, left: int) -> None:
        self._left = left  # all that is encoded is in the file; the same text over and over would fill the memory

    def __call__(self, text: str, encoding: object) -> bytes:
        self._left -= len(text)
        if self._left < 0 or not isinstance(encoding, str) or encoding not in ("latin1", "latin-1"):
            raise pickle.UnpicklingError("it encodes more than its own bytes")
        return text.encode("latin1")


class _PlainUnpickler(pickle.Unpickler):
    """Knows dictionaries, lists, texts, bytes, numbers and arrays; any other name is refused before it is looked up."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="latin1")
        self._allowed: dict[tuple[str, str], _StandIn] = {
            ("numpy.core.multiarray", "_reconstruct"): _NewArray(),
            ("numpy._core.multiarray", "_reconstruct"): _NewArray(),
            ("numpy", "ndarray"): _ArrayType(),
            ("numpy", "dtype"): _NewDType(),
            ("_codecs", "encode"): _Encode(len(content)),
        }

    def find_class(self, module: str, name: str) -> Any:
        """Give a harmless stand-in for a name, or refuse it."""
        if (module, name) not in self._allowed:
            asked = f"{module}.{name}"[:80]
            raise pickle.UnpicklingError(f"it asks for {asked}, which images and labels do not need")
        return self._allowed[module, name]


def _check_steps(content: bytes) -> None:
    """Refuse what could take much more memory than the file has bytes, before any of it is followed."""
    known = frozenset(OPCODES.split())
    for step, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if opcode.name not in known:
            raise pickle.UnpicklingError(f"it has the opcode {opcode.name}, which images and labels do not need")
        place = argument if "PUT" in opcode.name and isinstance(argument, int) else 0
        if max(step, place) > MAX_STEPS:
            raise pickle.UnpicklingError(f"it has more than {MAX_STEPS} values")


def _real(value: Any) -> Any:
    """Give the array for its stand-in."""
    if not isinstance(value, _Array):
        return value
    if value.values is None:
        _refuse_array()
    return value.values


def load_plain(path: Path) -> Any:
    """Load a pickle of plain values and arrays, alone or in one dictionary, or raise an error that names the file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a").write_bytes(pickle.dumps({"labels": [1, 2]}))
    ...     load_plain(Path(folder, "a"))
    {'labels': [1, 2]}
    """
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, at most {MAX_BYTES} are read")
    content = path.read_bytes()
    try:
        _check_steps(content)
        loaded = _PlainUnpickler(content).load()
        return {key: _real(value) for key, value in loaded.items()} if isinstance(loaded, dict) else _real(loaded)
    except Exception as error:  # a damaged or forged file fails wherever it likes
        raise ValueError(f"{path} is damaged or not what its name says: {error}") from error
