"""`ttac data fetch`: download a data set's files, check them, and unpack them to where they are looked for."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ttac.data.array_file import mebibytes
from ttac.data.sets import find_data
from ttac.data.sets.archives import unpack
from ttac.data.sets.download import DownloadError, check_file, download, part_of
from ttac.data.sets.spec import DatasetSpec, RemoteFile
from ttac.jobs import alone_in
from ttac.names import pick


def fetch(
    spec: DatasetSpec,
    root: Path,
    console: Console,
    *,
    mirrors: Sequence[str] = (),
    only: Sequence[str] = (),
    keep_archives: bool = False,
) -> None:
    """Bring a data set into its folder below `root`; what is there already is left, what was begun is gone on with."""
    folder = root / spec.name
    if not spec.files:
        raise ValueError(f"{spec.name} cannot be fetched. {spec.manual_steps(folder)}")
    for mirror in mirrors:
        if urlsplit(mirror).scheme not in ("http", "https"):
            raise ValueError(f"--mirror wants an address with http:// or https://, not {mirror}")
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
    said = [f"{spec.name} is in {find_data(spec.name, root).path}", f"cite: {spec.citation}"]
    said += [f"terms: {spec.terms}"] if spec.terms else []
    said += [spec.manual_steps(folder)] if spec.manual else []
    for line in said:
        console.print(line, markup=False, soft_wrap=True)


def by_hand(spec: DatasetSpec, files: Sequence[RemoteFile], folder: Path) -> str:
    """Say what to do without network."""
    named = f"{spec.name} --root {folder.parent}"
    sizes = {file.name: decimal(file.size) if file.size else "size not known" for file in files}
    return "\n".join(
        [
            "By hand, on a machine with network, or with another address (--mirror URL):",
            *(f"  download {file.url} ({sizes[file.name]})" for file in files),
            f"  put it into {folder}",
            f"  ttac data fetch {named}    checks and unpacks it",
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
    return [file for file in wanted if file.unpacks_to is None or not (folder / file.unpacks_to).exists()]


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
            missing = [other for other in files if not (folder / other.name).exists()]
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
