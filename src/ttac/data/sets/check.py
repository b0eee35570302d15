"""Whether a data set on disk is whole, part by part."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from rich.console import Console

from ttac.data.folder import UnreadableImageError, read_image
from ttac.data.sets import DataSet, arrays, cifar, image_files
from ttac.data.sets.download import check_file, check_sum
from ttac.data.sets.layout import Wanted
from ttac.data.sets.spec import DatasetSpec

ENDS = (b"\xff\xd9", b"IEND\xaeB`\x82")  # of JPEG and PNG files that are whole
TAIL = 64  # bytes at the end of a file in which one of them is

_Check = Callable[[], str]  # says what was compared, or raises


@dataclass(frozen=True)
class Finding:
    """What is true of one file or folder."""

    name: str
    state: Literal["ok", "missing", "damaged", "not needed"]
    detail: str


def report(found: DataSet, root: Path, console: Console) -> bool:
    """Print what is true of each part of a data set, and what to do where not all of it is whole; tell if it is."""
    assert found.spec is not None
    name, findings = found.spec.name, []
    console.print(f"{name} in {found.path}", markup=False, soft_wrap=True)
    for finding in check_data(found, root / name):
        line = f"{finding.state:10} {finding.name}: {finding.detail}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
        findings.append(finding)
    wrong = [finding for finding in findings if finding.state in ("missing", "damaged")]
    result = f"not whole: {len(wrong)} of {len(findings)} parts are missing or damaged" if wrong else "whole"
    console.print(f"{name} is {result}{_repair(found, root / name, wrong)}", markup=False, soft_wrap=True)
    return not wrong


def _repair(found: DataSet, folder: Path, wrong: Sequence[Finding]) -> str:
    """Say what to delete for a data set in its own folder to be fetched again: no more than has something wrong."""
    spec = found.spec
    if not wrong or spec is None or not spec.files or not found.path.is_relative_to(folder):
        return ""
    fetched = [folder / name for file in spec.files for name in (file.name, file.unpacks_to) if name is not None]
    by_hand = spec.extra_domains if spec.manual else ()  # which fetching does not mend
    tops = {finding.name.partition("/")[0] for finding in wrong if finding.name not in by_hand}
    concerned = [place for place in fetched if place.name in tops or any((place / top).exists() for top in tops)]
    concerned += [found.path] if tops and found.path in fetched else []
    delete = " ".join(dict.fromkeys(shlex.quote(str(place)) for place in concerned if place.exists()))
    again = (f"delete {delete} and fetch again" if delete else "fetch again") if tops else spec.manual_steps(folder)
    return f": {again}"


def check_data(found: DataSet, archives: Path) -> Iterator[Finding]:
    """Look at all that a data set of a name should have, and at files fetched into the folder `archives`."""
    spec = found.spec
    assert spec is not None
    places = {archives, found.path}  # files that are no archives may be elsewhere
    fetched = [(place / file.name, file) for file in spec.files for place in places]
    parts: list[tuple[str, _Check]] = [
        *((file.name, partial(check_file, path, file)) for path, file in fetched if path.is_file()),
        *_parts(found, spec),
    ]
    for name, check in parts:
        try:
            yield Finding(name, "ok", check())
        except (FileNotFoundError, ImportError) as error:  # embedded sets are missing where their package is
            needed = name.partition("/")[0] not in spec.extra_domains
            yield Finding(name, "missing" if needed else "not needed", str(error))
        except (ValueError, OSError) as error:
            yield Finding(name, "damaged", str(error))


def _parts(found: DataSet, spec: DatasetSpec) -> Iterator[tuple[str, _Check]]:
    """Name the parts that a data set should have; arrays are read, of image files the ends alone."""
    domains = (*spec.domains, *spec.extra_domains)
    match found.layout.kind:
        case "cifar":
            version = next(one for one in cifar.VERSIONS if one.holds == spec.name and one.there(found.path))
            for split, names in version.files.items():
                count = spec.counts[split] // len(names)
                for name in names:
                    yield name, partial(_check_cifar, found.path / name, version, spec, count)
        case "cifar-c" | "cifar10.1":
            for domain in domains:
                yield domain, partial(_check_arrays, found, "test", domain, spec.severities or (None,))
        case "imagenet-c":
            folders = image_files.corruption_folders(found.path)
            for domain in domains:
                for level in map(str, spec.severities):
                    place = folders.get(domain, found.path / domain) / level
                    yield f"{domain}/{level}", partial(_check_images, place, spec, "test")
        case "image-folders" if image_files.split_folders(found.path):
            for name in spec.counts:
                yield name, partial(_check_images, found.path / name, spec, name)
        case "image-folders":
            yield found.path.name, partial(_check_images, found.path, spec)
        case _:
            for split in spec.counts:
                yield split, partial(_check_arrays, found, split)


def _check_cifar(path: Path, version: cifar.Version, spec: DatasetSpec, count: int) -> str:
    cifar.read_file(path, version, count, spec.num_classes)
    compared = f"{count} images, labels"
    return f"{compared}, {check_sum(path, f'md5:{spec.md5[path.name]}')}" if path.name in spec.md5 else compared


def _check_arrays(
    found: DataSet, split: str, domain: str | None = None, severities: Sequence[int | None] = (None,)
) -> str:
    if split not in found.splits:
        raise FileNotFoundError(f"no {split} images")
    if found.layout.severities and domain not in arrays.corruptions_in(found.path):
        raise FileNotFoundError(f"no {domain}.npy")
    counts = [len(found.read(split, domain=domain, severity=severity)) for severity in severities]
    return f"{' + '.join(map(str, counts))} images, labels"


def _check_images(path: Path, spec: DatasetSpec, part: str = "") -> str:
    """Decode those files alone that do not end as whole ones do: there may be a million."""
    listing, broken = image_files.list_part(path, Wanted(spec), part), []
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
