"""Whether a data set on disk is whole, file by file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from ttac.data.corruptions.constants import SEVERITIES
from ttac.data.folder import UnreadableImageError, read_image
from ttac.data.sets import DataSet, arrays, cifar, image_files
from ttac.data.sets.download import check_file, file_sums
from ttac.data.sets.layout import Wanted
from ttac.data.sets.spec import DatasetSpec

ENDS = (b"\xff\xd9", b"IEND\xaeB`\x82")  # of JPEG and PNG files that are whole
TAIL = 64  # bytes at the end of a file in which one of them is


@dataclass(frozen=True)
class Finding:
    """What is true of one file or folder."""

    name: str
    state: Literal["ok", "missing", "damaged", "not needed"]
    detail: str


@dataclass(frozen=True)
class _Part:
    name: str
    check: Callable[[], str]  # says what was compared, or raises
    needed: bool = True


def check_data(found: DataSet, archives: Path) -> Iterator[Finding]:
    """Look at all that a data set of a name should have, and at files fetched into the folder `archives`."""
    assert found.spec is not None
    places = {archives, found.path}  # files that are no archives may be elsewhere
    fetched = [(place / file.name, file) for file in found.spec.files for place in places]
    for part in (
        *(_Part(file.name, partial(check_file, path, file)) for path, file in fetched if path.is_file()),
        *_PARTS[found.layout.kind](found, found.spec),
    ):
        try:
            yield Finding(part.name, "ok", part.check())
        except (FileNotFoundError, ImportError) as error:  # embedded sets are missing where their package is
            yield Finding(part.name, "missing" if part.needed else "not needed", str(error))
        except (ValueError, OSError) as error:
            yield Finding(part.name, "damaged", str(error))


def _splits(found: DataSet, spec: DatasetSpec) -> Iterator[_Part]:
    def check(split: str) -> str:
        if split not in found.splits:
            raise FileNotFoundError(f"no {split} images")
        return f"{len(found.read(split))} images, labels"

    for split in spec.counts:
        yield _Part(split, partial(check, split))


def _cifar(found: DataSet, spec: DatasetSpec) -> Iterator[_Part]:
    version = next(version for version in cifar.VERSIONS if version.holds == spec.name and version.there(found.path))

    def check(name: str, count: int) -> str:
        path = found.path / name
        cifar.read_file(path, version, count, spec.num_classes)
        if name not in spec.md5:
            return f"{count} images, labels"
        md5 = file_sums(path, ("md5",))["md5"]
        if md5 != spec.md5[name]:
            raise ValueError(f"{path} has the md5 {md5}, expected {spec.md5[name]}")
        return f"{count} images, labels, md5"

    for split, names in version.files.items():
        for name in names:
            yield _Part(name, partial(check, name, spec.counts[split] // len(names)))


def _domains(found: DataSet, spec: DatasetSpec) -> Iterator[_Part]:
    """Read arrays of all domains, at all severities where there are some."""

    def check(domain: str) -> str:
        if found.layout.severities and domain not in arrays.corruptions_in(found.path):
            raise FileNotFoundError(f"no {domain}.npy")
        read = [found.read("test", domain=domain, severity=level) for level in spec.severities or (None,)]
        return f"{' + '.join(str(len(data)) for data in read)} images, labels"

    for domain in (*spec.domains, *spec.extra_domains):
        yield _Part(domain, partial(check, domain), domain in spec.domains)


def _image_folders(found: DataSet, spec: DatasetSpec) -> Iterator[_Part]:
    wanted, there = Wanted(spec), image_files.split_folders(found.path)
    if not there:
        yield _Part(found.path.name, lambda: _check_images(_listed(found.path, wanted)))
    for name in spec.counts if there else ():

        def check(name: str = name) -> str:
            if name not in there:
                raise FileNotFoundError(f"no folder {found.path / name}")
            return _check_images(image_files.list_part(there[name], wanted, name))

        yield _Part(name, check, name not in spec.extra_domains)


def _listed(path: Path, wanted: Wanted) -> image_files.Listing:
    return image_files.list_file(path, wanted) if path.is_file() else image_files.list_part(path, wanted)


def _imagenet_c(found: DataSet, spec: DatasetSpec) -> Iterator[_Part]:
    there = image_files.corruption_folders(found.path)

    def check(domain: str, level: int) -> str:
        folder = there.get(domain, found.path / domain) / str(level)
        if not folder.is_dir():
            raise FileNotFoundError(f"no folder {folder}")
        return _check_images(image_files.list_classes(folder, Wanted(spec), "test"))

    for domain in (*spec.domains, *spec.extra_domains):
        for level in SEVERITIES:
            yield _Part(f"{domain}/{level}", partial(check, domain, level), domain in spec.domains)


def _check_images(listing: image_files.Listing) -> str:
    """Decode those files alone that do not end as whole ones do: there may be a million."""
    broken = []
    for name in listing.files:
        with (listing.folder / name).open("rb") as content:
            content.seek(-min(TAIL, content.seek(0, 2)), 2)
            tail = content.read()
        if not any(end in tail for end in ENDS):
            try:
                read_image(listing.folder / name, None, 3)
            except UnreadableImageError as error:
                broken.append(f"{name}: {error}")
    if broken:
        raise ValueError(f"{len(broken)} of {len(listing.files)} images cannot be read ({'; '.join(broken[:3])})")
    return f"{len(listing.files)} images of {len(set(listing.labels))} classes"


_PARTS: dict[str, Callable[[DataSet, DatasetSpec], Iterator[_Part]]] = {
    "embedded": _splits,
    "arrays": _splits,
    "cifar": _cifar,
    "cifar-c": _domains,
    "cifar10.1": _domains,
    "image-folders": _image_folders,
    "imagenet-c": _imagenet_c,
}
