"""`keywise send`: sends messages to the first source of a pipeline or of a lane."""

import asyncio
import select
import sys
from collections.abc import Iterator
from io import BufferedReader
from typing import Annotated, cast

import msgspec
import typer
from rich.progress import TextColumn, TimeElapsedColumn

from keywise.app import LANES, App
from keywise.cli.app_loader import AppOption, JsonOption, choose_pipelines, load
from keywise.cli.options import parse_duration
from keywise.cli.output import count, fail, print_result, progress, refuse
from keywise.core.errors import SettingsError, UnavailableError
from keywise.core.url import redacted

BATCH = 1000
READ_BYTES = 1 << 20


def send(
    pipeline: Annotated[str, typer.Argument(metavar="PIPELINE")],
    bodies: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="BODY",
            help="JSON documents, or what announces objects; with - or none, one per line from stdin.",
        ),
    ] = None,
    app: AppOption = None,
    delay: Annotated[
        str, typer.Option(metavar="DURATION", help="Deliver the messages after this delay, as 500ms, 5s.")
    ] = "0s",
    lane: Annotated[
        str | None, typer.Option(metavar="LANE", help="Send to the first source of this lane: live or bulk.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Send messages to a pipeline.

    They go to its first source, or to the first one of a lane.
    Messages to a pipeline of objects are sent as they are, and its dialect reads them: with dialect "uri", send URIs.

    \b
    Example:
      keywise send pages '{"id": "a", "version": 1}' --app shop:app
      keywise send pages --app shop:app < pages.jsonl
      keywise send pages --lane bulk --app shop:app < everything.jsonl
      keywise send uploads s3://uploads/2026/a.ndjson --app shop:app
    """
    loaded = load(app)
    choose_pipelines(loaded, [pipeline])
    delay_s = parse_duration(delay, "--delay")
    if lane not in (None, *LANES):
        refuse(f"--lane: {lane!r} is not known; write one of {', '.join(LANES)}")
    _check_place(loaded, pipeline, lane)
    sender = MessageSender(loaded, pipeline, delay_s, lane)
    try:
        if bodies and bodies != ["-"]:
            asyncio.run(sender.send_all([sender.checked_argument(body) for body in bodies]))
        else:
            asyncio.run(sender.send_lines(cast(BufferedReader, sys.stdin.buffer)))
    except UnavailableError as error:
        sent, others = f"sent {count(sender.sent, 'message')}", "the others may or may not have been sent"
        fail(f"{error}; {sent}; {others}: send them again, the same version twice changes nothing")
    text = f"sent {count(sender.sent, 'message')} to {pipeline}"
    print_result({"pipeline": pipeline, "sent": sender.sent}, text, json=json)


class MessageSender:
    """Sends messages to one pipeline, and counts those that are durable."""

    def __init__(self, app: App, pipeline: str, delay_s: float, lane: str | None = None) -> None:
        self.sent = 0
        self._app = app
        self._pipeline = pipeline
        self._delay_s = delay_s
        self._lane = lane
        self._body_max_bytes = app.pipelines[pipeline].settings.body_max_bytes
        self._is_json = app.pipelines[pipeline].objects is None
        """What announces an object may be any text."""

    def checked_argument(self, body: str) -> bytes:
        """Return a message; exit with status 2 if it has to be a JSON document, and is none."""
        return _checked_argument(body) if self._is_json else body.encode("utf-8", "surrogateescape")

    async def send_all(self, bodies: list[bytes]) -> None:
        async with self._app:
            for start in range(0, len(bodies), BATCH):
                await self._send(bodies[start : start + BATCH])

    async def send_lines(self, stream: BufferedReader) -> None:
        """Send one document per line. If input comes slowly, its lines do not wait for a full batch."""
        if stream.isatty():
            what = "JSON document" if self._is_json else "message"
            print(f"Reading one {what} per line; end with Ctrl-D.", file=sys.stderr)
        number = 0
        async with self._app:
            with progress(TextColumn("sent {task.fields[sent]:,}"), TimeElapsedColumn()) as bar:
                task = bar.add_task("", total=None, sent=0)
                for lines in _batches(stream, self._body_max_bytes):
                    good, wrong = _checked(lines) if self._is_json else ([line for line in lines if line.strip()], None)
                    if good:
                        await self._send(good)
                    if wrong is not None:
                        line, before = number + wrong[0] + 1, count(self.sent, "message")
                        fail(f"line {line} is no JSON document: {wrong[1]}; sent so far: {before}")
                    number += len(lines)
                    bar.update(task, sent=self.sent)

    async def _send(self, bodies: list[bytes]) -> None:
        await self._app.send(self._pipeline, *bodies, delay=self._delay_s, lane=self._lane)
        self.sent += len(bodies)


def _check_place(app: App, pipeline: str, lane: str | None) -> None:
    try:
        url = app.pipelines[pipeline].source_for(lane)
    except SettingsError as error:
        refuse(str(error))
    if url.startswith("memory:"):
        fail(
            f"the first source of {pipeline} is in memory ({redacted(url)}), so the messages would end with this "
            "command; use a source that is stored, for example sqlite:///shop.db"
        )


def _checked_argument(body: str) -> bytes:
    raw = body.encode("utf-8", "surrogateescape")
    _, wrong = _checked([raw])
    if wrong is not None:
        refuse(
            f'{body!r} is no JSON document: {wrong[1]}; put it in single quotes, as \'{{"id": "a"}}\', or send a file '
            "with one document a line: keywise send PIPELINE < FILE"
        )
    return raw


def _checked(lines: list[bytes]) -> tuple[list[bytes], tuple[int, str] | None]:
    """Return the documents before the first invalid line, and that line's index and cause. Empty lines are skipped."""
    good: list[bytes] = []
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            _CHECK(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return good, (index, str(error))
        good.append(line.strip())
    return good, None


def _batches(stream: BufferedReader, body_max_bytes: int) -> Iterator[list[bytes]]:
    """Yield full batches while input is available, and smaller ones when a read would block."""
    lines: list[bytes] = []
    rest = b""
    while chunk := stream.read1(READ_BYTES):
        *more, rest = (rest + chunk).split(b"\n")
        lines += more
        while len(lines) >= BATCH:
            yield lines[:BATCH]
            lines = lines[BATCH:]
        # At the end of the stream a read does not block either, so the last lines are yielded below.
        if lines and not select.select([stream], [], [], 0)[0]:
            yield lines
            lines = []
        if len(rest) > body_max_bytes:
            break  # The line is too long, and more input would only make it longer.
    if lines or rest:
        yield [*lines, rest]


_CHECK = msgspec.json.Decoder(msgspec.Raw).decode
