"""A file outside of Redis that says how far a ledger came, so that a loss is found even if no worker survived it."""

import hashlib
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import msgspec

from keywise.core.clock import Clock, boot_time
from keywise.core.errors import DatabaseError

EVERY_S = 1.0
"""How often the file is written while the number of the scope grows."""
SCOPE_MAX = 100
"""How much of the scope is in the name of the file, so that operators recognise the file."""


class Progress(msgspec.Struct, frozen=True):
    """What a worker last saw of a scope: its nonce, and the number of its last write."""

    nonce: str
    seq: int


class ProgressFile:
    """The file of one scope on one server. Workers of one machine may share it."""

    def __init__(self, folder: str, server: str, scope: str, clock: Clock = boot_time) -> None:
        # A pipeline may move to another server, where it has another nonce.
        digest = hashlib.sha256(f"{server} {scope}".encode()).hexdigest()[:16]
        self._path = Path(folder) / f"{quote(scope, safe='')[:SCOPE_MAX]}-{digest}.witness"
        self._clock = clock
        self._noted: Progress | None = None
        self._noted_at = 0.0

    def read(self) -> Progress | None:
        """Return what was noted last; None if nothing was."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Progress)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise DatabaseError(f"{self._path} cannot be read: {error}; remove it, or name another folder") from error

    def open(self, seen: Progress) -> None:
        """Note what is there, as every worker does at its start. Raises DatabaseError if the file cannot be written."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            known = self.read()
            if known is not None and known.nonce == seen.nonce and known.seq > seen.seq:
                seen = known  # Another worker has noted more since the server was asked.
            self._write(seen)
        except OSError as error:
            raise DatabaseError(f"{self._path} cannot be written: {error}; name a folder of this user") from error

    def note(self, look: Callable[[], Progress], *, at_once: bool = False) -> None:
        """Note how far the scope has come, at most once a second."""
        if not at_once and self._clock() < self._noted_at + EVERY_S:
            return
        self._noted_at = self._clock()
        seen = look()
        if seen == self._noted:
            return
        # A full disk, for example, must not stop the work: the file is only behind then.
        with suppress(OSError, DatabaseError):
            before = self.read()
            if before is None or before.nonce != seen.nonce or before.seq < seen.seq:
                self._write(seen)
            self._noted = seen

    def _write(self, seen: Progress) -> None:
        # One process may write from several threads. Not by `tempfile`: other users may have to read the file.
        draft = self._path.with_name(f"{self._path.name}.{secrets.token_hex(8)}")
        try:
            draft.write_bytes(msgspec.json.encode(seen))
            draft.replace(self._path)
        finally:
            draft.unlink(missing_ok=True)
