"""What is particular to one data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal
from urllib.parse import urlsplit

LayoutKind = Literal["embedded", "arrays", "array-pair", "cifar", "cifar-c", "cifar10.1", "image-folders", "imagenet-c"]


@dataclass(frozen=True)
class RemoteFile:
    """A file to fetch, and what tells that it is whole.

    >>> RemoteFile("https://example.org/files/noise.tar?download=1").name
    'noise.tar'
    """

    url: str
    size: int | None = None  # bytes
    checksum: str | None = None  # kind:digits
    unpacks_to: str | None = None  # folder that an archive becomes; None: the file is used as it is
    unpacked: int | None = None  # bytes that it holds at most; None: it is not compressed
    optional: bool = False  # fetched only where it is asked for

    @property
    def name(self) -> str:
        """The file's own name."""
        return PurePosixPath(urlsplit(self.url).path).name


@dataclass(frozen=True)
class DatasetSpec:
    """All that is particular to one data set."""

    name: str
    title: str
    layout: LayoutKind
    num_classes: int
    counts: Mapping[str, int]  # images of a split or a domain; of one severity where there are severities
    citation: str
    size: tuple[int, int] = (32, 32)  # height, width that image files are made
    channels: int = 3
    crop_pct: float = 1.0
    classes: tuple[str, ...] | None = None  # None: the sorted names of the class folders
    mean: tuple[float, ...] | None = None  # the usual normalisation
    std: tuple[float, ...] | None = None
    source: str | None = None  # the data set that it is a shift of
    domains: tuple[str, ...] = ()
    extra_domains: tuple[str, ...] = ()  # outside the paper's tables
    severities: tuple[int, ...] = ()
    folders: tuple[str, ...] = ()  # usual names on disk, beside the name itself
    files: tuple[RemoteFile, ...] = ()
    md5: Mapping[str, str] = field(default_factory=dict)  # published sums of unpacked files
    package: str | None = None  # to import, where that is what an embedded data set comes with
    manual: str = ""  # what nobody can fetch; FOLDER is where the data set is to be
    terms: str = ""

    def manual_steps(self, folder: Path) -> str:
        """Say what is to be done by hand for a data set that is to lie in `folder`."""
        return self.manual.replace("FOLDER", str(folder))
