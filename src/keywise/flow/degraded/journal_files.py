"""Journals as files in a folder: a worker locks the file that it writes, so an unlocked one is of a dead worker."""

import asyncio
import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from keywise.core.errors import SettingsError, UnavailableError
from keywise.flow.degraded.journal import JournalContents, JournalFile, Orphans, read

T = TypeVar("T")

SUFFIX = ".journal"
FRESH = ".fresh"
"""The suffix of a file that is about to replace a journal."""


class JournalDirectory:
    """The journals of one pipeline in a local folder. File names contain the owner, so that workers do not collide."""

    def __init__(self, folder: str, pipeline: str, owner: str) -> None:
        self._folder = Path(folder)
        self._prefix = f"{quote(pipeline, safe='')}@"
        self._owner = quote(owner, safe="")
        self._number = 0

    def prepare(self) -> None:
        """Create the folder and check that it is writable, at start: during an outage it would be too late."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            probe = self._folder / f"{self._prefix}{self._owner}.probe"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise SettingsError(
                f"journal={str(self._folder)!r} cannot be written: {error.strerror}; name a folder that this worker "
                "can write to and that survives a restart"
            ) from error

    async def create(self) -> "LockedFile":
        self._number += 1
        path = self._folder / f"{self._prefix}{self._owner}-{self._number}{SUFFIX}"
        return await _in_thread(path, lambda: _created(path))

    async def orphans(self) -> Orphans:
        def look() -> Orphans:
            found, troubles = list[JournalFile](), list[str]()
            for path in [*self._mine(FRESH), *self._mine(SUFFIX)]:
                try:
                    file = _found(path)
                    if file is not None and path.suffix == FRESH:
                        _tidy_away(path, file)
                    elif file is not None:
                        found.append(file)
                except OSError as error:
                    # Continue with the other files.
                    troubles.append(_format_error(path, error))
            return Orphans(found, troubles)

        return await _in_thread(self._folder, look)

    def _mine(self, suffix: str) -> list[Path]:
        return _those(self._folder, self._prefix, suffix)


class LockedFile:
    """A journal file, open and locked."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.name = path.name
        self._path = path
        self._descriptor = descriptor

    async def read(self) -> bytes:
        return await _in_thread(self._path, self._path.read_bytes)

    async def append(self, text: bytes, *, durably: bool) -> None:
        def act() -> None:
            size = os.fstat(self._descriptor).st_size
            try:
                _write(self._descriptor, text)
            except OSError:
                # An incomplete line would corrupt the next one.
                os.ftruncate(self._descriptor, size)
                raise
            if durably:
                os.fsync(self._descriptor)

        await _in_thread(self._path, act)

    async def rewrite(self, text: bytes) -> None:
        def act() -> None:
            fresh = self._path.with_suffix(FRESH)
            # Lock the new file before it gets the name that other workers look for.
            other = _open_locked(fresh, os.O_CREAT | os.O_TRUNC)
            if other is None:
                raise BlockingIOError(errno.EWOULDBLOCK, "another worker is checking whether it was left behind")
            try:
                _write(other, text)
                os.fsync(other)
                fresh.rename(self._path)
            except OSError:
                # Delete the incomplete file: the disk may be full.
                os.close(other)
                fresh.unlink(missing_ok=True)
                raise
            os.close(self._descriptor)
            self._descriptor = other
            _sync_folder(self._path.parent)

        await _in_thread(self._path, act)

    async def remove(self) -> None:
        def act() -> None:
            self._path.unlink(missing_ok=True)
            _sync_folder(self._path.parent)
            self.close()

        await _in_thread(self._path, act)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def contents_in(folder: str, pipeline: str) -> tuple[list[JournalContents], list[str]]:
    """Read all journals of a pipeline, also those of live workers; return their contents and the errors.

    No file is locked.
    """
    found, troubles = list[JournalContents](), list[str]()

    def look(path: Path, act: Callable[[], T]) -> T | None:
        try:
            return act()
        except FileNotFoundError:
            pass  # The journal was just handed over and removed, or no worker has run here yet.
        except OSError as error:
            troubles.append(f"{path}: {error.strerror}")
        return None

    there, prefix = Path(folder), f"{quote(pipeline, safe='')}@"
    for path in look(there, lambda: _those(there, prefix, SUFFIX)) or []:
        text = look(path, path.read_bytes)
        if text is not None:
            found.append(read(text))
    return found, troubles


def _those(folder: Path, prefix: str, suffix: str) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.startswith(prefix) and path.suffix == suffix)


def _created(path: Path) -> LockedFile:
    descriptor = _open_locked(path, os.O_CREAT | os.O_EXCL)
    assert descriptor is not None, "the name is new"
    try:
        _sync_folder(path.parent)
    except OSError:
        os.close(descriptor)
        raise
    return LockedFile(path, descriptor)


def _found(path: Path) -> LockedFile | None:
    """Open and lock an orphaned journal; None if its worker lives, or another worker has taken it."""
    try:
        descriptor = _open_locked(path, 0)
    except FileNotFoundError:
        return None
    if descriptor is None:
        return None
    # Between open and lock, its worker may have replaced or removed the file.
    try:
        is_same = os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        is_same = False
    if not is_same:
        os.close(descriptor)
        return None
    return LockedFile(path, descriptor)


def _tidy_away(path: Path, left: LockedFile) -> None:
    """Remove the replacement that a dead worker had not yet renamed; its journal is intact."""
    try:
        path.unlink(missing_ok=True)
    finally:
        left.close()


def _open_locked(path: Path, flags: int) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return descriptor


def _write(descriptor: int, text: bytes) -> None:
    left = memoryview(text)
    while left:
        left = left[os.write(descriptor, left) :]


def _sync_folder(folder: Path) -> None:
    """Flush a folder: a new or removed name is durable only after that."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


async def _in_thread(path: Path, act: Callable[[], T]) -> T:
    """Run file operations in a thread, because a disk may be slow; OSError becomes UnavailableError."""
    try:
        return await asyncio.to_thread(act)
    except OSError as error:
        raise UnavailableError(_format_error(path, error)) from error


def _format_error(path: Path, error: OSError) -> str:
    return f"the journal {path} cannot be used: {error.strerror}"
