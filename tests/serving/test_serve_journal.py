"""The journal: whole lines whatever is killed, bounded files, and a service that goes on without it."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from ttac.serving.journal import Faults, Journal


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "state" / "events.jsonl")


def messages(journal: Journal, count: int = 1000) -> list[str]:
    return [entry["message"] for entry in journal.tail(count)]


def test_events_come_back_oldest_first_with_their_fields(journal: Journal) -> None:
    assert journal.tail(5) == []
    for number in range(4):
        journal.note("publish", f"number {number}", version=number)
    assert messages(journal, 2) == ["number 2", "number 3"]
    assert journal.tail(0) == []
    newest = journal.tail(1)[0]
    assert (newest["event"], newest["version"]) == ("publish", 3)
    assert abs(newest["time"] - journal.path.stat().st_mtime) < 5


def test_long_files_give_their_newest_events(journal: Journal) -> None:
    for number in range(3000):
        journal.note("publish", f"{number} " + "x" * (number % 120))
    assert [int(text.split()[0]) for text in messages(journal, 2900)] == list(range(100, 3000))


@pytest.mark.parametrize("torn", [b'{"time": 1, "event": "pub', b"\xff\xfe\x00", b"[1, 2]\n", b"[" * 100_000])
def test_a_torn_line_is_skipped_and_spoils_no_other(journal: Journal, torn: bytes) -> None:
    journal.note("start", "before")
    with journal.path.open("ab") as file:
        file.write(torn)
    assert messages(journal) == ["before"]
    journal.note("start", "after")
    assert messages(journal) == ["before", "after"]


def test_every_line_is_strict_json(journal: Journal) -> None:
    journal.note(
        "guard", 'new\nline "quoted"', measures={"entropy": float("nan"), "norm": float("inf")}, folder=Path("a")
    )
    (line,) = journal.path.read_text().splitlines()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    entry = json.loads(line, parse_constant=refuse)
    assert entry["measures"] == {"entropy": None, "norm": None}
    assert entry["message"] == 'new\nline "quoted"'


def test_files_are_bounded_and_the_newest_events_stay(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl", limit=2000)
    for number in range(200):
        journal.note("publish", f"number {number}")
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 * 2100
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.1.jsonl", "events.jsonl"]
    kept = messages(journal)
    assert kept == [f"number {number}" for number in range(200 - len(kept), 200)]
    assert len(kept) > 20


def test_a_process_that_comes_late_to_rotate_leaves_the_new_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl", limit=200)
    journal.note("publish", "short")
    late = os.open(journal.path, os.O_RDWR | os.O_APPEND)  # another process has it open
    journal.note("publish", "x" * 200)
    journal.note("publish", "new")
    journal._rotate(late)
    os.close(late)
    assert messages(journal) == ["short", "x" * 200, "new"]


def test_processes_write_at_once_and_no_line_is_lost(journal: Journal) -> None:
    pids = []
    for writer in range(4):
        pid = os.fork()
        if not pid:
            for number in range(50):
                journal.note("publish", f"{writer} {number}", filling="x" * 500)
            os._exit(0)
        pids.append(pid)
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in pids)
    assert sorted(messages(journal)) == sorted(f"{writer} {number}" for writer in range(4) for number in range(50))


def test_a_journal_that_cannot_be_written_is_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    journal = Journal(tmp_path / "file" / "events.jsonl")
    with caplog.at_level(logging.INFO, "ttac.serving"):
        journal.note("publish", "version 7", version=7)
    assert journal.tail(3) == []
    first, second = caplog.records
    assert first.getMessage() == "version 7"
    assert first.fields == {"event": "publish", "version": 7}  # type: ignore[attr-defined]
    assert "cannot be written" in second.getMessage()


def test_faults_of_one_kind_are_journalled_once_in_a_while(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    faults = Faults(journal)
    for number in range(5):
        faults.note("samples", f"bad {number}")
    faults.note("snapshot", "full")
    assert messages(journal) == ["bad 0", "full"]
    now[0] += 61
    faults.note("samples", "bad again", "rollback", version=3)
    last = journal.tail(1)[0]
    assert (last["message"], last["unsaid"], last["event"], last["version"]) == ("bad again", 4, "rollback", 3)
