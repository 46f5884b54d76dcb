"""Decompresses objects while they are read, and knows where each gzip member or zstd frame begins."""

import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from keywise.core.errors import MissingExtraError, ObjectError
from keywise.ingest.parts import UPLOAD_AGAIN

COMPRESSIONS = ("auto", "none", "gzip", "zstd")
MAGIC_BYTES = 4
"""How many bytes of an object say whether it is compressed."""
OUTPUT_BYTES = 1024 * 1024
"""The most that is decompressed at once: a few bytes of an object may hold gigabytes."""
INPUT_MIN_BYTES, INPUT_MAX_BYTES = 16 * 1024, 256 * 1024
"""What a member is fed at once. It begins small: what is behind a short member is copied each time."""
BOUNDARY_BYTES = 64 * 1024
"""Of the members that begin in one such span of the content, only the first is remembered."""


def compression_of(start: bytes) -> str:
    """Return `gzip`, `zstd` or nothing by the first bytes of an object. No text begins like a compressed object."""
    if start.startswith(b"\x1f\x8b"):
        return "gzip"
    # A file that was compressed in parallel begins with a frame to be skipped.
    is_skippable = len(start) >= MAGIC_BYTES and 0x50 <= start[0] <= 0x5F and start[1:4] == b"\x2a\x4d\x18"
    return "zstd" if start.startswith(b"\x28\xb5\x2f\xfd") or is_skippable else ""


class Decompressor(Protocol):
    """Turns the bytes of an object into its content."""

    def feed(self, chunk: bytes) -> Iterator[bytes]: ...

    def finish(self) -> None:
        """Raise `ObjectError` if the object ends too early."""

    def boundary(self, offset: int) -> tuple[int, int]:
        """Where to begin in order to get to `offset` of the content: the byte of the object, and its own offset.

        Offsets must not fall from call to call.
        """


class PlainContent:
    """An object that is not compressed: its bytes are the content."""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        yield chunk

    def finish(self) -> None:
        pass

    def boundary(self, offset: int) -> tuple[int, int]:
        return offset, offset


class MemberDecompressor:
    """Reads every member of a gzip file, or every frame of a zstd file."""

    def __init__(self, compression: str, start: int, offset: int) -> None:
        """`start` is where a member begins in the object, and `offset` where its content does."""
        self._compression = compression
        self._new_member: Callable[[], _GzipMember | _ZstdFrame] = _MEMBERS[compression]
        self._member: _GzipMember | _ZstdFrame | None = None
        self._member_at = start
        self._read = start
        self._written = offset
        self._boundaries = deque([(start, offset)])
        self._input_bytes = INPUT_MIN_BYTES

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        at = 0
        while at < len(chunk):
            if self._member is None:
                padding = self._padding(chunk, at)
                at, self._read = at + padding, self._read + padding
                if at == len(chunk):
                    return
                self._begin()
            assert self._member is not None
            piece = chunk[at : at + self._input_bytes]
            yield from self._decompress(self._member, piece)
            used = len(piece) - self._member.unused
            at, self._read = at + used, self._read + used
            if self._member.is_over:
                self._member = None
            else:
                self._input_bytes = min(self._input_bytes * 2, INPUT_MAX_BYTES)

    def finish(self) -> None:
        if self._member is not None:
            raise ObjectError(
                f"the object ends at byte {self._read}, inside the {self._compression} data that begins at byte "
                f"{self._member_at}; it is truncated: {UPLOAD_AGAIN}"
            )

    def boundary(self, offset: int) -> tuple[int, int]:
        while len(self._boundaries) > 1 and self._boundaries[1][1] <= offset:
            self._boundaries.popleft()
        return self._boundaries[0]

    def _begin(self) -> None:
        self._member = self._new_member()
        self._member_at = self._read
        self._input_bytes = INPUT_MIN_BYTES
        # Which boundaries are kept depends on their offsets alone, so a resumed reader keeps the same ones.
        if self._written // BOUNDARY_BYTES != self._boundaries[-1][1] // BOUNDARY_BYTES:
            self._boundaries.append((self._read, self._written))

    def _decompress(self, member: "_GzipMember | _ZstdFrame", piece: bytes) -> Iterator[bytes]:
        try:
            for content in member.decompress(piece):
                self._written += len(content)
                yield content
        except member.errors as error:
            raise ObjectError(
                f"the {self._compression} data that begins at byte {self._member_at} of the object is corrupt, between "
                f"byte {self._read} and {self._read + len(piece)}: {error}; {UPLOAD_AGAIN}"
            ) from error

    def _padding(self, chunk: bytes, at: int) -> int:
        """Count zero bytes between members: tapes and disks fill up their last block."""
        if self._compression != "gzip" or chunk[at]:
            return 0
        return len(chunk) - at - len(chunk[at:].lstrip(b"\0"))


class _GzipMember:
    errors: tuple[type[Exception], ...] = (zlib.error,)

    def __init__(self) -> None:
        self._engine = zlib.decompressobj(wbits=31)

    @property
    def is_over(self) -> bool:
        return self._engine.eof

    @property
    def unused(self) -> int:
        return len(self._engine.unused_data)

    def decompress(self, piece: bytes) -> Iterator[bytes]:
        while True:
            content = self._engine.decompress(piece, OUTPUT_BYTES)
            if content:
                yield content
            piece = self._engine.unconsumed_tail
            if self._engine.eof or (not piece and len(content) < OUTPUT_BYTES):
                return


class _ZstdFrame:
    def __init__(self) -> None:
        zstd = _zstd()
        self.errors: tuple[type[Exception], ...] = (zstd.ZstdError,)
        self._engine = zstd.ZstdDecompressor()

    @property
    def is_over(self) -> bool:
        return bool(self._engine.eof)

    @property
    def unused(self) -> int:
        return len(self._engine.unused_data)

    def decompress(self, piece: bytes) -> Iterator[bytes]:
        while True:
            content = self._engine.decompress(piece, OUTPUT_BYTES)
            if content:
                yield content
            piece = b""
            if self._engine.eof or self._engine.needs_input:
                return


_MEMBERS: dict[str, Any] = {"gzip": _GzipMember, "zstd": _ZstdFrame}


def _zstd() -> Any:
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"zstd objects need {error.name}, which is not installed; run: pip install 'keywise[objects]'"
        ) from error
    return zstd
