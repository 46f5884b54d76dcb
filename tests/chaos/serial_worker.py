"""A process whose callers ask a serial function without end, or so many times: what they are told is written down."""

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import keywise
from chaos.serial_diary import Diary
from chaos.serial_tables import book_of
from keywise import Claim, Transaction
from keywise.core.clock import boot_time
from keywise.core.errors import PermanentError, SerialError, UnavailableError


def serve(options: dict) -> None:
    diary = Diary(Path(options["diary"]))
    app = keywise.App(options["url"], observers=[])
    accept = (_booking if options["is_atomic"] else _accepting)(app, diary, options)
    asyncio.run(_call_all(app, accept, diary, options))


def _accepting(app: keywise.App, diary: Diary, options: dict):
    """A function that writes outside, where lower tokens are refused."""

    @app.serial("accept", key=lambda request: request["key"], **options["settings"])
    async def accept(claim: Claim, request: dict) -> dict:
        number = diary.begins(request["id"], claim.key, claim.token, os.getpid())
        taken = diary.taken(claim.key)
        await _work(options)
        is_feasible = taken < options["capacity"]
        if is_feasible and not diary.accepts(claim.key, request["id"], claim.token):
            raise PermanentError("a newer token was here")
        diary.ends(number)
        return {"accepted": is_feasible, "before": taken}

    return accept


def _booking(app: keywise.App, diary: Diary, options: dict):
    """A function that writes in the store's own transaction."""
    book = book_of(options["url"])

    @app.serial("accept", key=lambda request: request["key"], **options["settings"])
    async def accept(claim: Claim, request: dict, transaction: Transaction) -> dict:
        number = diary.begins(request["id"], claim.key, claim.token, os.getpid())
        taken = await book.taken(transaction.connection, claim.key)
        await _work(options)
        await book.enter(transaction.connection, claim.key, request["id"], taken)
        diary.ends(number)
        return {"accepted": True, "before": taken}

    return accept


async def _work(options: dict) -> None:
    """It takes its time, and other callers go on meanwhile."""
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), options["work_s"])


async def _call_all(app, accept, diary: Diary, options: dict) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with app:
        await asyncio.gather(*(_caller(accept, diary, options, stop, number) for number in range(options["callers"])))


async def _caller(accept, diary: Diary, options: dict, stop: asyncio.Event, caller: int) -> None:
    asked = 0
    while not stop.is_set() and asked < options["calls"]:
        number = caller * options["calls"] + asked
        id = f"{options['name']}-{os.getpid()}-{number}"
        if options["shared"] and number % options["shared"] == 0:
            id = f"shared-{number}"
        key = f"k{number % options['keys']}"
        asked += 1
        began, timeout_s = boot_time(), options["timeout_s"]
        try:
            answer = json.dumps(await accept({"id": id, "key": key}, id=id, timeout=timeout_s))
            outcome = "done"
        except (SerialError, UnavailableError) as error:
            outcome, answer = type(error).__name__, str(error)
        diary.tells(id, os.getpid(), outcome, answer, began, boot_time(), began + timeout_s)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
