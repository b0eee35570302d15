"""`ttac data fetch`: download a data set's files, check them, and unpack them to where they are looked for."""

from __future__ import annotations

import errno
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ttac.common.lookup import pick
from ttac.common.resumable import alone_in
from ttac.data.array_file import mebibytes
from ttac.data.sets import DataSet, find_data
from ttac.data.sets.archives import unpack
from ttac.data.sets.check import Finding, check_data
from ttac.data.sets.download import DownloadError, check_file, download, part_of
from ttac.data.sets.spec import DatasetSpec, RemoteFile


def fetch(
    spec: DatasetSpec,
    root: Path,
    console: Console,
    *,
    mirrors: Sequence[str] = (),
    only: Sequence[str] = (),
    keep_archives: bool = False,
) -> bool:
    """Bring a data set into its folder below `root`, and say whether it is whole there.

    What is there already is left, what was begun is gone on with.
    """
    folder = root / spec.name
    if not spec.files:
        raise ValueError(f"{spec.name} cannot be fetched. {spec.manual_steps(folder)}")
    for mirror in mirrors:
        address = urlsplit(mirror)
        if address.scheme not in ("http", "https"):
            raise ValueError(f"--mirror wants an address with http:// or https://, not {mirror}")
        if address.query or address.fragment:
            raise ValueError(f"--mirror wants the address of a folder, without ? and #, not {mirror}")
    files = _files_to_bring(spec, root, only)
    if files:
        with alone_in(folder):
            _check_space(folder, files, keep_archives)
            for file in files:
                _bring(spec, file, folder, mirrors, console)
                if file.unpacks_to is not None:
                    _unpack(folder / file.name, folder / file.unpacks_to, file, console)
                    if not keep_archives:
                        (folder / file.name).unlink()
    found = _found_whole(spec, root, console, only)
    if found is None:
        return False
    said = [f"{spec.name} is in {found.path}", f"cite: {spec.citation}"]
    said += [f"terms: {spec.terms}"] if spec.terms else []
    said += [spec.manual_steps(folder)] if spec.manual else []
    for line in said:
        console.print(line, markup=False, soft_wrap=True)
    return True


def _found_whole(spec: DatasetSpec, root: Path, console: Console, only: Sequence[str]) -> DataSet | None:
    """Find a data set and read its parts; beside files that were chosen, others may be missing."""
    folder = root / spec.name
    try:
        found = find_data(spec.name, root)
    except FileNotFoundError:
        unpacked = [folder / str(file.unpacks_to) for file in spec.files if _is_unpacked(file, folder)]
        if only or not unpacked:
            raise
        said = [f"{spec.name} is not whole: {_delete(unpacked)}fetch again"]
    else:
        states, others = (("damaged",), {file.name for file in spec.files}) if only else (("missing", "damaged"), set())
        findings = [finding for finding in check_data(found, folder) if finding.name not in others]
        wrong = _fetchable(spec, [finding for finding in findings if finding.state in states])
        if not wrong:
            return found
        said = [f"{finding.state} {finding.name}: {finding.detail}" for finding in wrong]
        said.append(f"{spec.name} is not whole{repair(found, root, wrong)}")
    for line in said:
        console.print(line, markup=False, soft_wrap=True)
    return None


def repair(found: DataSet, root: Path, wrong: Sequence[Finding]) -> str:
    """Say what to delete for a data set below `root` to be fetched again: no more than has something wrong."""
    spec = found.spec
    if spec is None or not spec.files or not found.path.is_relative_to(root):
        return ""
    folder = root / spec.name
    wrong = _fetchable(spec, wrong)
    if not wrong:
        return f". {spec.manual_steps(folder)}"
    archives = [file for file in spec.files if file.unpacks_to is not None]
    unpacked = [folder / str(file.unpacks_to) for file in archives if _is_unpacked(file, folder)]
    # What was never unpacked comes by itself, but not beside data that are elsewhere.
    comes = found.path.is_relative_to(folder) and not all(
        _is_unpacked(file, folder) or file.optional for file in archives
    )
    places: list[Path] = []
    for finding in wrong:
        top = finding.name.partition("/")[0]
        if any(file.name == top for file in spec.files):
            places += [place / top for place in (folder, found.path) if (place / top).is_file()]
        else:
            around = [place for place in unpacked if place.name == top or (place / top).exists()]
            places += around or ([found.path] if archives and not comes else [])
    return f": {_delete(places)}fetch again"


def _fetchable(spec: DatasetSpec, wrong: Sequence[Finding]) -> list[Finding]:
    """Leave out extra parts that want something done by hand, which fetching does not mend."""
    by_hand = spec.extra_domains if spec.manual else ()
    return [finding for finding in wrong if finding.name not in by_hand]


def _delete(places: Sequence[Path]) -> str:
    named = " ".join(shlex.quote(str(place)) for place in dict.fromkeys(places))
    return f"delete {named} and " if places else ""


def by_hand(spec: DatasetSpec, files: Sequence[RemoteFile], folder: Path) -> str:
    """Say what to do without network."""
    named = f"{spec.name} --root {shlex.quote(str(folder.parent))}"
    them = "it" if len(files) == 1 else "them"
    sizes = {file.name: decimal(file.size) if file.size else "size not known" for file in files}
    return "\n".join(
        [
            "By hand, on a machine with network, or with another address (--mirror URL):",
            *(f"  download {file.url} ({sizes[file.name]})" for file in files),
            f"  put {them} into {folder}",
            f"  ttac data fetch {named}    checks and unpacks {them}",
            f"  ttac data check {named}    says what is there",
        ]
    )


def _files_to_bring(spec: DatasetSpec, root: Path, only: Sequence[str]) -> list[RemoteFile]:
    folder = root / spec.name
    if only:
        known = {file.name: file for file in spec.files}
        wanted = [pick(name, known, f"file of {spec.name}") for name in only]
    else:
        try:
            elsewhere = not find_data(spec.name, root).path.is_relative_to(folder)
        except FileNotFoundError:
            elsewhere = False
        wanted = [file for file in spec.files if not file.optional and not elsewhere]
    return [file for file in wanted if not _is_unpacked(file, folder)]


def _is_unpacked(file: RemoteFile, folder: Path) -> bool:
    return file.unpacks_to is not None and (folder / file.unpacks_to).exists()


def _bring(spec: DatasetSpec, file: RemoteFile, folder: Path, mirrors: Sequence[str], console: Console) -> None:
    target = folder / file.name
    if target.exists():  # put there by hand, or kept
        try:
            check_file(target, file)
        except ValueError as error:
            raise ValueError(f"{error}; delete it, and it is fetched again") from error
        return
    urls = [*(f"{mirror.rstrip('/')}/{file.name}" for mirror in mirrors), file.url]
    with Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
        console=console,
    ) as progress:  # fmt: skip
        task = progress.add_task(file.name, total=file.size)
        try:
            download(file, target, urls, lambda done, total: progress.update(task, completed=done, total=total))
        except DownloadError as error:
            files = [other for other in spec.files if other is file or not other.optional]
            missing = [
                other for other in files if not (folder / other.name).exists() and not _is_unpacked(other, folder)
            ]
            raise DownloadError(f"{file.name} was not fetched: {error}\n{by_hand(spec, missing, folder)}") from error


def _unpack(archive: Path, target: Path, file: RemoteFile, console: Console) -> None:
    console.print(f"unpacking {archive.name}", markup=False)
    limit = file.unpacked or archive.stat().st_size  # a plain archive cannot hold more than itself
    try:
        unpack(archive, target, limit)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = mebibytes(shutil.disk_usage(archive.parent).free)
        raise OSError(
            f"the disk is full: {archive} takes up to {mebibytes(limit)} more, and {free} are free. It is kept, and "
            "nothing is half unpacked: make space, and the same command goes on"
        ) from error


def _check_space(folder: Path, files: Sequence[RemoteFile], keep_archives: bool) -> None:
    """Refuse to begin what cannot end; archives that are not kept are there one at a time."""
    archives = [file for file in files if file.unpacks_to is not None]
    unpacked = sum(file.unpacked or file.size or 0 for file in archives)
    at_a_time = (sum if keep_archives else max)([0, *(file.size or 0 for file in archives)])
    plain = sum(file.size or 0 for file in files if file.unpacks_to is None)
    paths = [path for file in files for path in (folder / file.name, part_of(folder / file.name))]
    needed = unpacked + at_a_time + plain - sum(path.stat().st_size for path in paths if path.is_file())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            f"{folder} needs {mebibytes(needed)} more, and {mebibytes(free)} are free: make space, or choose another "
            "--root"
        )
