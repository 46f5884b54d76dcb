"""A store of documents behind HTTP, as a process of its own: it keeps versions and rates, or misbehaves, as it is told.

It speaks plain sockets, so that it can break the protocol too. `/-/rules/SPACE` sets how a space behaves,
`/-/state/SPACE` tells what it holds and what came in; documents are at `/SPACE/documents/KEY`.
"""

import asyncio
import json
import ssl
import sys
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

ORDER_HEADERS = ("keywise-era", "keywise-version", "keywise-generation")
HUGE_BYTES = 1 << 40


@dataclass
class Request:
    """What somebody asked for."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def order(self) -> list[int]:
        return [int(self.headers.get(name, 0)) for name in ORDER_HEADERS]


@dataclass
class Reply:
    """What it is told."""

    status: int
    body: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    def encoded(self) -> bytes:
        body = self.body.encode()
        lines = [f"HTTP/1.1 {self.status} told", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass
class Space:
    """Documents that nobody else uses, with rules of their own."""

    rules: dict[str, Any] = field(default_factory=dict)
    documents: dict[str, dict[str, Any]] = field(default_factory=dict)
    held: dict[str, list[int]] = field(default_factory=dict)
    """The newest order of each key; those of deletions too, unless they are forgotten."""
    log: list[dict[str, Any]] = field(default_factory=list)
    accepted: dict[str, list[float]] = field(default_factory=dict)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    """What came late is worked on."""

    def misbehaviour(self) -> str | None:
        """What to do instead of a proper answer, if its turn has come and is not over."""
        if "fault" not in self.rules:
            return None
        if self.rules.get("after", 0) > 0:
            self.rules["after"] -= 1
            return None
        times = self.rules.get("times")
        if times is not None:
            if times <= 0:
                return None
            self.rules["times"] = times - 1
        return str(self.rules["fault"])

    def answer(self, request: Request) -> Reply:
        wanted = self.rules.get("authorization")
        if wanted is not None and request.headers.get("authorization") != wanted:
            return Reply(401, f"not let in: {request.headers.get('authorization')}")
        key = unquote(request.target.rpartition("/")[2])
        now = time.monotonic()
        recent = [at for at in self.accepted.get(key, []) if now - at < 1.0]
        if len(recent) >= self.rules.get("per_s", 1_000_000):
            return Reply(429, "too often", self.rules.get("headers", {"Retry-After": "1"}))
        reply = self.store(key, request)
        if reply.status < 300:
            self.accepted[key] = [*recent, now]
        return reply

    def is_too_low(self, order: list[int], held: list[int]) -> bool:
        return order < held or (order == held and bool(self.rules.get("refuses_equal")))

    def store(self, key: str, request: Request) -> Reply:
        held, refusal = self.held.get(key), self.rules.get("conditional")
        if refusal and held is not None and self.is_too_low(request.order, held):
            shown = dict(zip(ORDER_HEADERS, map(str, held), strict=True)) if self.rules.get("tells") else {}
            return Reply(refusal, "older than what is held", shown)
        if key == self.rules.get("refuses"):
            return Reply(422, "this store takes no bad key")
        self.held[key] = request.order
        if request.headers.get("keywise-deleted") == "true":
            if self.rules.get("forgets"):
                del self.held[key]
            return Reply(204) if self.documents.pop(key, None) else Reply(404, "no such document")
        self.documents[key] = {"body": request.body.decode(), "order": request.order}
        return Reply(200, "stored")


class Service:
    """All spaces, and the connections to them."""

    def __init__(self) -> None:
        self.spaces: dict[str, Space] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await received(reader)) is not None:
                if not await self.reply(request, reader, writer):
                    break
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def reply(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """False if the connection ends with it."""
        parts = request.target.split("/")
        if parts[1] == "-":
            writer.write(self.told(request, parts[2], parts[3]).encoded())
            return True
        space = self.spaces.setdefault(parts[1], Space())
        fault, peer = space.misbehaviour(), writer.get_extra_info("peername")[1]
        line = {"at": time.time(), "method": request.method, "target": request.target, "headers": request.headers}
        line |= {"body": request.body.decode(), "peer": peer, "status": None}
        space.log.append(line)
        if fault == "late":
            await space.released.wait()
            fault = None
        reply = space.answer(request) if fault is None or space.rules.get("writes") else Reply(500)
        if fault is not None:
            return await misbehave(fault, space, reader, writer)
        line["status"] = reply.status
        writer.write(reply.encoded())
        return not space.rules.get("closes")

    def told(self, request: Request, what: str, name: str) -> Reply:
        space = self.spaces.setdefault(name, Space())
        if what == "rules":
            space.rules = json.loads(request.body)
            if space.rules.get("releases"):
                space.released.set()
            return Reply(204)
        return Reply(200, json.dumps({"documents": space.documents, "held": space.held, "log": space.log}))


async def received(reader: asyncio.StreamReader) -> Request | None:
    try:
        begin = await reader.readexactly(1)
        if not begin.isalpha():
            return None  # Somebody speaks TLS, and would wait for an answer to that.
        head = (begin + await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.rstrip().split("\r\n")
    method, target, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Request(method, target, headers, await reader.readexactly(int(headers.get("content-length", 0))))


async def misbehave(fault: str, space: Space, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Whether the connection goes on."""
    match fault:
        case "answer":
            reply = Reply(**space.rules["answer"])
            space.log[-1]["status"] = reply.status
            writer.write(reply.encoded())
            return True
        case "hang":
            await reader.read()
        case "hang in the answer":
            writer.write(b"HTTP/1.1 200 told\r\nContent-Length: 10\r\n\r\nhalf")
            await reader.read()
        case "short":
            writer.write(b"HTTP/1.1 200 told\r\nContent-Length: 100\r\n\r\nhalf of it")
        case "long":
            writer.write(
                b"HTTP/1.1 200 told\r\nContent-Length: 2\r\n\r\nok" + Reply(418, "for somebody else").encoded()
            )
            return True
        case "garbage":
            writer.write(b"nobody speaks HTTP here\r\n\r\n")
        case "huge":
            writer.write(f"HTTP/1.1 200 told\r\nContent-Length: {HUGE_BYTES}\r\n\r\n".encode())
            while True:
                writer.write(b"x" * 65536)
                await writer.drain()
        case _:
            assert fault == "cut", fault
    return False


async def main(certificate: str, key: str) -> None:
    service, trust = Service(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trust.load_cert_chain(certificate, key)
    plain = await asyncio.start_server(service.serve, "127.0.0.1", 0, limit=1 << 20)
    encrypted = await asyncio.start_server(service.serve, "127.0.0.1", 0, ssl=trust, limit=1 << 20)
    sys.stdout.write(json.dumps([server.sockets[0].getsockname()[1] for server in (plain, encrypted)]) + "\n")
    sys.stdout.flush()
    # It ends with whoever started it.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
