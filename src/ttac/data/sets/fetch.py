"""`ttac data fetch`: download a data set's files, check them, and unpack them to where they are looked for."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ttac.common.files import writing
from ttac.common.lookup import pick
from ttac.common.resumable import alone_in
from ttac.data.array_file import check_space_of
from ttac.data.sets import find_data
from ttac.data.sets.archives import unpack
from ttac.data.sets.check import report
from ttac.data.sets.download import DownloadError, check_file, download
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
    """Bring a data set into its folder below `root`, or `only` some of its files, and say whether it is whole there.

    What is there already is left, what was begun is gone on with.
    """
    folder = root / spec.name
    if not spec.files:
        raise ValueError(f"{spec.name} cannot be fetched. {spec.manual_steps(folder)}")
    for mirror in mirrors:
        if not mirror.startswith(("http://", "https://")):
            raise ValueError(f"--mirror wants an address with http:// or https://, not {mirror}")
    if only:
        known = {file.name: file for file in spec.files}
        files = [pick(name, known, f"file of {spec.name}") for name in only]
    else:
        files = [] if _is_elsewhere(spec, root) else [file for file in spec.files if not file.optional]
    with alone_in(folder):
        check_space_of(folder, _space(_missing(files, folder), keep_archives))
        for file in _missing(files, folder):
            urls = [*(f"{mirror.rstrip('/')}/{file.name}" for mirror in mirrors), file.url]
            try:
                with writing(folder / file.name):
                    _bring(file, folder, urls, console)
                    if file.unpacks_to is not None:
                        _unpack(file, folder, keep_archives, console)
            except DownloadError as error:
                steps = _by_hand(spec, _missing(files, folder), folder)
                raise DownloadError(f"{file.name} was not fetched: {error}\n{steps}") from error
    try:
        whole = bool(only) or report(find_data(spec.name, root), root, console)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{folder} does not hold {spec.name}: delete it and fetch again") from error
    for line in (f"cite: {spec.citation}", spec.terms and f"terms: {spec.terms}", spec.manual_steps(folder)):
        if line:
            console.print(line, markup=False, soft_wrap=True)
    return whole


def _is_elsewhere(spec: DatasetSpec, root: Path) -> bool:
    try:
        return not find_data(spec.name, root).path.is_relative_to(root / spec.name)
    except FileNotFoundError:
        return False


def _missing(files: Sequence[RemoteFile], folder: Path) -> list[RemoteFile]:
    """Leave out what is unpacked; files that are used as they are come to be checked."""
    return [file for file in files if file.unpacks_to is None or not (folder / file.unpacks_to).exists()]


def _space(files: Sequence[RemoteFile], keep_archives: bool) -> dict[str, int]:
    """Count the bytes of files and of what archives hold; archives are there one at a time, unless they are kept."""
    archives = sorted((file for file in files if file.unpacks_to is not None), key=lambda file: file.size or 0)
    plain = [file for file in files if file.unpacks_to is None]
    downloads = {file.name: file.size or 0 for file in (*plain, *archives[0 if keep_archives else -1 :])}
    return downloads | {f"what {file.name} holds": file.unpacked or file.size or 0 for file in archives}


def _bring(file: RemoteFile, folder: Path, urls: Sequence[str], console: Console) -> None:
    target = folder / file.name
    if target.exists():  # put there by hand, or kept
        try:
            check_file(target, file)
        except ValueError as error:
            raise ValueError(f"{error}; delete it, and it is fetched again") from error
        return
    with Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
        console=console,
    ) as progress:  # fmt: skip
        task = progress.add_task(file.name, total=file.size)
        download(file, target, urls, lambda done, total: progress.update(task, completed=done, total=total))


def _unpack(file: RemoteFile, folder: Path, keep_archive: bool, console: Console) -> None:
    archive = folder / file.name
    console.print(f"unpacking {file.name}", markup=False)
    # A plain archive cannot hold more than itself.
    unpack(archive, folder / str(file.unpacks_to), file.unpacked or archive.stat().st_size)
    if not keep_archive:
        archive.unlink()


def _by_hand(spec: DatasetSpec, files: Sequence[RemoteFile], folder: Path) -> str:
    """Say what to do without network."""
    named = f"{spec.name} --root {shlex.quote(str(folder.parent))}"
    lines = [
        "By hand, on a machine with network, or with another address (--mirror URL):",
        *(f"  download {file.url} ({decimal(file.size) if file.size else 'size not known'})" for file in files),
        f"  put what was downloaded into {folder}",
        f"  ttac data fetch {named}    checks and unpacks it",
        f"  ttac data check {named}    says what is there",
    ]
    return "\n".join(lines)
