"""Spools: what their lines say together, how they stay small, and how they are kept as files."""

import asyncio
import errno
import fcntl
import os
from pathlib import Path

import pytest

from flow.degraded.memory_journal import Paper
from keywise.core.change import ChangeHeader
from keywise.core.errors import SettingsError, UnavailableError
from keywise.flow.degraded import journal as journals
from keywise.flow.degraded.journal import DirtyKeyJournal, JournalContents, read
from keywise.flow.degraded.journal_files import JournalDirectory, contents_in
from running import awaited


def header(key: str, version: int, *, deleted: bool = False) -> ChangeHeader:
    return ChangeHeader(key, (0, version, 0), deleted)


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "journal"


@pytest.fixture(params=["paper", "files"])
def journal_store(request, folder):
    """A journal store without a disk behaves as the real one does."""
    return Paper() if request.param == "paper" else prepared(folder)


def prepared(folder: Path, owner: str = "w1", pipeline: str = "a/b") -> JournalDirectory:
    journal_store = JournalDirectory(str(folder), pipeline, owner)
    journal_store.prepare()
    return journal_store


async def filled(journal_store, *headers: ChangeHeader) -> DirtyKeyJournal:
    journal = DirtyKeyJournal(journal_store, keys_max=100)
    await journal.note(headers, since=5.0)
    return journal


def noted(folder: Path, pipeline: str = "a/b") -> list[JournalContents]:
    found, troubles = contents_in(str(folder), pipeline)
    assert troubles == []
    return found


def test_lines_say_together_what_may_be_in_the_sink():
    text = b'{"since": 5.0, "begun": [["a", [0, 2, 0], false], ["b", [0, 1, 0], true], ["c", [0, 1, 0], false]]}\n'
    text += b'{"written": ["a"], "clean": ["c"]}\n{"begun": [["a", [0, 1, 0], false]]}\n{"written": ["a"]}\n'
    text += b'{"begun": [["b", [0'
    contents = read(text)
    assert (contents.since, contents.headers, contents.flying) == (
        5.0,
        {"a": header("a", 2)},
        {"b": header("b", 1, deleted=True)},
    )
    assert contents.suspects() == [header("a", 2), header("b", 1, deleted=True)]
    assert not contents.is_full


def test_a_last_line_that_is_not_whole_was_never_acted_on_and_other_damage_may_hide_keys():
    assert read(b'{"begun"') == JournalContents()
    assert read(b'{"begun"\n{"since": 5.0}\n') == JournalContents(since=5.0, is_full=True)
    assert read(b'{"begun": [["\xff", [0, 1, 0], false]]}\n{"since": 5.0}\n') == JournalContents(
        since=5.0, is_full=True
    )


@awaited
async def test_a_journal_is_found_again_by_one_worker_only(journal_store):
    first = await filled(journal_store, header("a", 1))
    second = DirtyKeyJournal(journal_store, 100)
    await second.find()
    assert second.is_empty
    first.close()
    await second.find()
    third = DirtyKeyJournal(journal_store, 100)
    await third.find()
    assert (third.is_empty, second.withheld) == (True, {"a"})
    [(file, contents)] = second.pending()
    assert contents.suspects() == [header("a", 1)]
    await second.forget(file, contents)
    await second.tidy()
    second.close()
    await third.find()
    assert third.is_empty


@awaited
async def test_what_is_handed_over_is_gone_and_the_next_outage_begins_anew(journal_store):
    journal = await filled(journal_store, header("a", 1))
    [(file, contents)] = journal.pending()
    await journal.forget(file, contents)
    await journal.tidy()
    assert journal.is_empty
    await journal.note([header("b", 1)], since=9.0)
    [(_, contents)] = journal.pending()
    assert (contents.since, contents.keys) == (9.0, {"b"})
    journal.close()


@pytest.mark.parametrize("more", [header("a", 2), header("b", 1)])
@awaited
async def test_what_was_noted_while_the_ledger_was_told_is_handed_over_too(journal_store, more):
    journal = await filled(journal_store, header("a", 1))
    [(file, contents)] = journal.pending()
    await journal.note([more], since=5.0)
    await journal.forget(file, contents)
    [(_, contents)] = journal.pending()
    assert more in contents.suspects()
    await journal.forget(file, contents)
    assert journal.is_empty
    journal.close()


@awaited
async def test_what_cannot_be_removed_is_tried_again_and_in_the_end_left_to_the_next_worker():
    paper = Paper()
    first, second = paper.leave(b'{"since": 5.0}\n'), paper.leave(b'{"since": 6.0}\n')
    journal = DirtyKeyJournal(paper, 100)
    await journal.find()
    paper.is_stuck = True
    for file, contents in journal.pending():
        await journal.forget(file, contents)
    with pytest.raises(UnavailableError, match="it cannot be removed; it cannot be removed"):
        await journal.tidy()
    assert (journal.is_empty, len(paper.sheets)) == (True, 2)
    journal.close()
    assert not (first.is_held or second.is_held)


@awaited
async def test_a_journal_is_written_anew_when_most_of_it_is_outdated(journal_store, monkeypatch):
    monkeypatch.setattr(journals, "BYTES_MIN", 1000)
    monkeypatch.setattr(journals, "BYTES_A_KEY", 1)
    journal = await filled(journal_store, header("still flying", 1))
    for version in range(100):
        await journal.note([header("a", version)], since=5.0)
        await journal.ended(["a"], [])
    journal.close()
    again = DirtyKeyJournal(journal_store, 100)
    await again.find()
    [(file, contents)] = again.pending()
    assert len(await file.read()) < 1500
    assert (contents.since, contents.suspects()) == (5.0, [header("a", 99), header("still flying", 1)])
    assert again.withheld == {"still flying"}
    again.close()


@awaited
async def test_nothing_to_say_is_not_written(journal_store):
    journal = await filled(journal_store, header("a", 1))
    await journal.ended([], [])
    await journal.ended(["b"], ["c"])
    await journal.note([], since=5.0)
    [(_, contents)] = journal.pending()
    assert contents.keys == {"a"}
    journal.close()


@awaited
async def test_two_that_note_at_once_share_one_journal(journal_store):
    journal = DirtyKeyJournal(journal_store, 100)
    await asyncio.gather(*(journal.note([header(key, 1)], since=5.0) for key in "abc"))
    [(_, contents)] = journal.pending()
    assert contents.keys == {"a", "b", "c"}
    journal.close()


@awaited
async def test_past_the_threshold_only_the_fact_is_kept(journal_store):
    journal = DirtyKeyJournal(journal_store, keys_max=2)
    await journal.note([header(key, 1) for key in "abc"], since=5.0)
    await journal.note([header("a", 2), header("d", 1)], since=5.0)
    assert journal.is_full
    [(_, contents)] = journal.pending()
    assert (contents.suspects(), contents.is_full) == ([header("a", 2), header("b", 1)], True)
    journal.close()


@awaited
async def test_a_journal_that_cannot_be_read_is_left_and_the_others_are_taken():
    paper = Paper()
    paper.leave(b"").is_torn = True
    paper.leave(b'{"since": 5.0}\n')
    journal = DirtyKeyJournal(paper, 100)
    with pytest.raises(UnavailableError, match="torn"):
        await journal.find()
    assert [sheet.is_held for sheet in paper.sheets] == [False, True]
    assert [contents.since for _, contents in journal.pending()] == [5.0]


@awaited
async def test_a_worker_that_is_stopped_while_it_reads_leaves_the_rest():
    paper, reading = Paper(), asyncio.Event()
    first, _ = paper.leave(b""), paper.leave(b"")

    async def hang() -> bytes:
        reading.set()
        return await asyncio.Future()

    first.read = hang
    finding = asyncio.create_task(DirtyKeyJournal(paper, 100).find())
    await reading.wait()
    finding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await finding
    assert [sheet.is_held for sheet in paper.sheets] == [False, False]


@awaited
async def test_files_are_told_apart_by_pipeline_and_read_by_anybody(folder):
    journal = await filled(prepared(folder), header("a", 1))
    other = await filled(prepared(folder, pipeline="a"), header("b", 1))
    assert [contents.keys for contents in noted(folder)] == [{"a"}]
    assert [contents.keys for contents in noted(folder, "a")] == [{"b"}]
    assert noted(folder / "nowhere") == []
    journal.close(), other.close()


@awaited
async def test_a_file_that_vanishes_while_it_is_looked_at_is_no_harm(folder, monkeypatch):
    journal = await filled(prepared(folder), header("a", 1))
    journal.close()
    [path] = folder.iterdir()
    names = [path, path.with_name("a%2Fb@gone.journal"), path.with_name("a%2Fb@gone.fresh")]
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(names))
    assert len(noted(folder)) == 1
    later = DirtyKeyJournal(prepared(folder, "w2"), 100)
    await later.find()
    assert len(later.pending()) == 1
    later.close()


@pytest.mark.parametrize("is_gone", [True, False])
@awaited
async def test_a_file_that_was_replaced_meanwhile_is_left_alone(folder, monkeypatch, is_gone):
    journal = await filled(prepared(folder), header("a", 1))
    journal.close()
    [path] = folder.iterdir()
    lock = fcntl.flock

    def too_late(descriptor, how):
        lock(descriptor, how)
        path.unlink()
        if not is_gone:
            path.touch()

    monkeypatch.setattr(fcntl, "flock", too_late)
    later = DirtyKeyJournal(prepared(folder, "w2"), 100)
    await later.find()
    assert later.is_empty


@awaited
async def test_a_line_that_did_not_fit_leaves_no_part_of_itself(folder, monkeypatch):
    journal = await filled(prepared(folder), header("a", 1))
    write = os.write

    def half(descriptor, text):
        if len(text) > 10:
            return write(descriptor, bytes(text)[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(UnavailableError, match="No space left on device"):
        await journal.note([header("b", 1)], since=5.0)
    monkeypatch.undo()
    await journal.note([header("c", 1)], since=5.0)
    [contents] = noted(folder)
    assert (contents.keys, contents.is_full) == ({"a", "c"}, False)
    journal.close()


def full_for(monkeypatch, *names: str) -> None:
    """A disk that has no room for files that end so."""
    write = os.write

    def refuse(descriptor, text):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(names):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, text)

    monkeypatch.setattr(os, "write", refuse)


def open_files(folder: Path) -> int:
    linked = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return sum(name.startswith(str(folder)) for name in linked)


@awaited
async def test_a_file_that_could_not_be_written_anew_is_as_it_was_and_is_tried_again(folder, monkeypatch):
    file = await prepared(folder).create()
    await file.append(b"old\n", durably=True)
    full_for(monkeypatch, ".fresh")
    for _ in range(2):
        with pytest.raises(UnavailableError, match="No space left on device"):
            await file.rewrite(b"new\n")
    assert ([path.suffix for path in folder.iterdir()], open_files(folder)) == ([".journal"], 1)
    monkeypatch.undo()
    await file.append(b"more\n", durably=True)
    assert await file.read() == b"old\nmore\n"
    await file.rewrite(b"new\n")
    await file.append(b"more\n", durably=True)
    assert await file.read() == b"new\nmore\n"
    file.close()


@awaited
async def test_what_dead_workers_were_about_to_put_in_place_is_removed(folder):
    journal_store = prepared(folder)
    (folder / "a%2Fb@dead-1.fresh").write_bytes(b"half")
    (folder / "other@dead-1.fresh").touch()
    with (folder / "a%2Fb@alive-1.fresh").open("wb") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        assert await journal_store.orphans() == ([], [])
    assert sorted(path.name for path in folder.iterdir()) == ["a%2Fb@alive-1.fresh", "other@dead-1.fresh"]


@awaited
async def test_a_file_is_not_written_anew_while_somebody_looks_at_its_place(folder):
    file = await prepared(folder).create()
    [path] = folder.iterdir()
    with path.with_suffix(".fresh").open("wb") as looked_at:
        fcntl.flock(looked_at, fcntl.LOCK_EX)
        with pytest.raises(UnavailableError, match="left behind"):
            await file.rewrite(b"new\n")
    await file.rewrite(b"new\n")
    assert await file.read() == b"new\n"
    file.close()


@pytest.mark.parametrize("name", ["flock", "fsync"])
@awaited
async def test_a_file_that_cannot_be_begun_is_not_kept_open(folder, monkeypatch, name):
    def refuse(*given):
        raise OSError(errno.EIO, "Input/output error")

    journal_store = prepared(folder)
    monkeypatch.setattr(fcntl if name == "flock" else os, name, refuse)
    with pytest.raises(UnavailableError, match="Input/output error"):
        await journal_store.create()
    assert open_files(folder) == 0


@awaited
async def test_a_journal_that_cannot_be_had_keeps_nobody_from_the_others(folder):
    (await filled(prepared(folder), header("a", 1))).close()
    for name in ("a%2Fb@a.journal", "a%2Fb@z.journal", "a%2Fb@z.fresh"):
        (folder / name).mkdir()
    later = DirtyKeyJournal(prepared(folder, "w2"), 100)
    with pytest.raises(
        UnavailableError, match=r"@z\.fresh .*; .*@a\.journal .*; .*@z\.journal cannot be used: Is a directory"
    ):
        await later.find()
    assert [contents.keys for _, contents in later.pending()] == [{"a"}]
    later.close()
    assert open_files(folder) == 0


@awaited
async def test_a_folder_that_cannot_be_looked_into_is_told(folder):
    journal_store = prepared(folder)
    folder.rmdir()
    folder.touch()
    assert contents_in(str(folder), "a/b") == ([], [f"{folder}: Not a directory"])
    with pytest.raises(UnavailableError, match="Not a directory"):
        await journal_store.orphans()


@awaited
async def test_what_is_half_and_cannot_be_removed_is_not_kept_open(folder, monkeypatch):
    journal_store = prepared(folder)
    (folder / "a%2Fb@dead-1.fresh").touch()

    def refuse(path, missing_ok):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    files, [trouble] = await journal_store.orphans()
    assert (files, trouble.endswith("Read-only file system"), open_files(folder)) == ([], True, 0)


@awaited
async def test_closing_a_file_twice_is_no_harm(folder):
    file = await prepared(folder).create()
    await file.remove()
    file.close()


def test_a_folder_that_cannot_be_written_is_refused_at_start(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="cannot be written"):
        JournalDirectory(str(tmp_path / "file" / "journal"), "shop", "w1").prepare()
