"""An HTTP server that gives the answers it was told to give, for what a real engine says only on its worst days."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Said:
    """One answer; without a status the connection is closed instead."""

    status: int | None
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def encoded(self) -> bytes:
        body = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        lines = [f"HTTP/1.1 {self.status} Said", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass(frozen=True)
class Heard:
    """One request."""

    method: str
    path: str
    body: bytes


class StubEngine:
    """Answers in the order given."""

    def __init__(self) -> None:
        self.answers: list[Said] = []
        self.heard: list[Heard] = []
        self.port = 0

    def says(self, *answers: Said) -> None:
        self.answers += answers

    @property
    def url(self) -> str:
        return f"opensearch://127.0.0.1:{self.port}/pages"

    def paths(self) -> list[str]:
        return [one.path.partition("?")[0] for one in self.heard]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._answered(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answered(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = [line.partition(": ") for line in head.split("\r\n")[1:]]
        length = {name.lower(): value for name, _, value in lines}.get("content-length", "0")
        method, path, _ = head.split(" ", 2)
        self.heard.append(Heard(method, path, await reader.readexactly(int(length))))
        answer = self.answers.pop(0)
        if answer.status is None:
            return False
        writer.write(answer.encoded())
        await writer.drain()
        return True


@asynccontextmanager
async def stub_engine(*answers: Said) -> AsyncIterator[StubEngine]:
    engine = StubEngine()
    engine.says(*answers)
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    engine.port = server.sockets[0].getsockname()[1]
    try:
        yield engine
        assert engine.answers == [], "answers that nobody asked for"
    finally:
        server.close()


def items(*told: Mapping[str, Any]) -> Said:
    """The answer to a bulk request."""
    return Said(200, {"errors": any("error" in one for one in told), "items": [{"index": one} for one in told]})


def trouble(status: int, kind: str, reason: str = "") -> dict[str, Any]:
    """An item that failed."""
    return {"status": status, "error": {"type": kind, "reason": reason}}


def documents(*told: Mapping[str, Any]) -> Said:
    """The answer to a multi-get."""
    return Said(200, {"docs": list(told)})


def lines_of(body: bytes) -> Sequence[Any]:
    """What a bulk request says."""
    assert body.endswith(b"\n")
    return [json.loads(line) for line in body.splitlines()]


WELL = {"status": 201}
INDEX = Said(200, {"pages": {"aliases": {}}})
