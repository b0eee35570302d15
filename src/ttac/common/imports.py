"""Code that is imported by the name a user gives: a package that need not be there, a file, something in either."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from ttac.common.files import text_hash


def optional_package(name: str) -> tuple[Any, str]:
    """Import a package that need not be there; None and the reason where that fails.

    >>> optional_package("no_such_package")
    (None, 'no_such_package is not installed (pip install no_such_package)')
    """
    try:
        return importlib.import_module(name), ""
    except ImportError:
        return None, f"{name} is not installed (pip install {name})"
    except RuntimeError as error:  # a torchvision that was built for another torch
        return None, f"{name} is installed but cannot be imported ({error})"


def file_and_name(place: str) -> tuple[Path, str] | None:
    """Split `path/to/file.py:name`, None where it is something else.

    >>> file_and_name("package.module:name") is None
    True
    """
    file, colon, name = place.rpartition(":")
    return (Path(file), name) if colon and file.endswith(".py") else None


def import_file(file: Path) -> ModuleType:
    """Import a file as a module of its own, once, or raise a ValueError that says why it fails."""
    name = f"ttac_file_{text_hash([str(file.resolve())])}_{file.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise ValueError(f"{file} could not be imported: {type(error).__name__}: {error}") from error
    return sys.modules[name]
