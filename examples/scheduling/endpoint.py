"""The desk behind HTTP, on this machine only: `POST /accept` takes a care request, and answers with a decision.

Run as a process, it prints where it listens.
"""

import argparse
import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.scheduling import schedule
from examples.scheduling.care import CareRequest, Decision, market_and_day
from examples.scheduling.desk import STORE_VARIABLE, TURNS_VARIABLE, decide, desk_at, store_url

from keywise import KeywiseError
from keywise.core import errors

HOST = "127.0.0.1"
BODY_MAX_BYTES = 10_000
EXAMPLE = '{"id": "cr-17", "market": "Denver", "earliest": "2026-12-01T09:00:00", "latest": "2026-12-01T12:00:00"}'

Accept = Callable[[CareRequest], Awaitable[Decision]]

ANSWERS = {
    errors.RefusedError: (422, ""),
    errors.ExpiredError: (503, "; nothing was booked, ask again with the same id"),
    errors.RequestCancelledError: (503, "; nothing was booked, ask again with a new id"),
    errors.UnavailableError: (503, "; ask again with the same id"),
    errors.UnansweredError: (504, ""),
    errors.LostError: (504, "; look into the schedule before you ask with a new id"),
    errors.FailedError: (500, "; nothing was booked, tell whoever runs this desk, and ask with a new id then"),
}
"""The status of each error, and what to do where its message does not say so."""


class Endpoint:
    """What is said over HTTP to whoever asks."""

    def __init__(self, accept: Accept) -> None:
        self._accept = accept

    def application(self) -> web.Application:
        application = web.Application(client_max_size=BODY_MAX_BYTES)
        application.router.add_post("/accept", self.post)
        return application

    async def post(self, http: web.Request) -> web.Response:
        try:
            request = msgspec.json.decode(await http.read(), type=CareRequest)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return _json_response(400, {"error": f"this is no care request: {error}; send for example {EXAMPLE}"})
        try:
            decision = await self._accept(request)
        except KeywiseError as error:
            status, advice = ANSWERS.get(type(error), (500, "; tell whoever runs this desk"))
            return _json_response(status, {"error": f"{error}{advice}"})
        # No is an answer, and not a failure: the caller can offer something else.
        return _json_response(200 if decision.accepted else 409, decision)


@asynccontextmanager
async def serial_desk(store: str, turns: str) -> AsyncIterator[Accept]:
    """One at a time per market and day, in all processes."""
    async with desk_at(store, turns) as app:
        accept_if_feasible = app.serials["accept"]

        async def accept(request: CareRequest) -> Decision:
            decision: Decision = await accept_if_feasible(request, id=request.id)
            return decision

        yield accept


@asynccontextmanager
async def naive_desk(store: str) -> AsyncIterator[Accept]:
    """Whoever comes is served at once."""
    async with schedule.connected(store) as connection:

        async def accept(request: CareRequest) -> Decision:
            market_and_day(request)
            return await decide(connection, request)

        yield accept


async def serve(options: argparse.Namespace) -> None:
    store = store_url()
    async with schedule.connected(store):
        pass  # The table is there from now on.
    desk = naive_desk(store) if options.naive else serial_desk(store, os.environ.get(TURNS_VARIABLE, ""))
    async with desk as accept:
        runner = web.AppRunner(Endpoint(accept).application(), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, HOST, options.port).start()
        sys.stdout.write(f"http://{HOST}:{runner.addresses[0][1]}\n")
        sys.stdout.flush()
        await _until_ended(is_attached=options.attached)
        await runner.cleanup()


async def _until_ended(*, is_attached: bool) -> None:
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        loop.call_soon_threadsafe(ended.set)

    if is_attached:
        threading.Thread(target=watch, daemon=True).start()
    await ended.wait()


def _json_response(status: int, body: Decision | dict[str, str]) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Accept care requests over HTTP, on this machine only, and print where.",
        epilog=f"example: {STORE_VARIABLE}=sqlite:///clinic.db "
        ".venv/bin/python examples/scheduling/endpoint.py --port 8080, "
        f"then curl --data '{EXAMPLE}' http://{HOST}:8080/accept",
    )
    parser.add_argument("--port", type=int, default=0, help="where to listen; any free port without it")
    parser.add_argument("--naive", action="store_true", help="without a serial function: read, think, write")
    parser.add_argument("--attached", action="store_true", help="end when the standard input does")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        asyncio.run(serve(_options()))
    except schedule.ScheduleError as error:
        sys.exit(f"{error}; {STORE_VARIABLE} says where it is")
    except OSError as error:
        sys.exit(f"the desk cannot open: {error}; try another --port")
