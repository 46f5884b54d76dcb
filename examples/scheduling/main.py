"""Books care requests from many callers at once, naively and one at a time per market and day, and compares both."""

import argparse
import asyncio
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from examples import real_servers
from examples.scheduling import load, processes, report, schedule
from examples.scheduling.care import CARS
from examples.scheduling.desk import FOLDER, STORE_VARIABLE, file_in
from examples.scheduling.load import DAYS, Fields, Told
from examples.scheduling.report import Run

SMALL = "Tampa"
FILLING_MAX = 100
TURNS = ("postgres-lock", "postgres-queue")


def main() -> int:
    options = _options()
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    real_servers.end_on_sigterm()
    with ExitStack() as stack:
        store = options.store
        if options.servers and not store:
            real_servers.demand("postgres")
            console.print("starting PostgreSQL …")
            store = stack.enter_context(processes.started_postgres())
        if not store:
            shutil.rmtree(options.folder, ignore_errors=True)
            options.folder.mkdir(parents=True)
            store = file_in(options.folder)
        return asyncio.run(_compare(console, options, store))


async def _compare(console: Console, options: argparse.Namespace, store: str) -> int:
    """The same requests twice, each time with an empty schedule."""
    requests = load.care_requests(options.requests, options.seed)
    console.print(
        f"{options.requests:,} care requests for {len(CARS)} markets and {len(DAYS)} days, one in {load.REPEATED} sent "
        f"twice, from {options.callers} callers to {options.desks} processes with one schedule"
    )
    runs = [await _booked(console, options, store, requests, is_naive=is_naive) for is_naive in (True, False)]
    report.print_report(console, runs)
    if store == file_in(options.folder):
        _print_commands(console, store)
    return 0 if runs[1].is_right else 1


async def _booked(
    console: Console, options: argparse.Namespace, store: str, requests: Sequence[Fields], *, is_naive: bool
) -> Run:
    async with schedule.connected(store) as connection:
        await schedule.empty(connection)
        with processes.started_desks(options.desks, store, options.turns, is_naive=is_naive) as urls:
            told = await load.ask_all(urls, requests, options.callers)
            if not is_naive:
                told += await _hard_cases(console, urls)
        return Run("naive" if is_naive else "keywise", await schedule.all_visits(connection), told)


async def _hard_cases(console: Console, urls: Sequence[str]) -> list[Told]:
    """Ask until a market has nothing left, and for what nobody can decide about; return what was decided."""
    told: list[Told] = []
    while len(told) < FILLING_MAX and all(one.status == report.ACCEPTED for one in told):
        told.append(await _asked(urls, load.whole_day(SMALL, DAYS[0])))
    _print_answer(console, "a fully booked market", told[-1])
    both = {**load.whole_day(SMALL, DAYS[0]), "latest": f"{DAYS[1]}T10:00:00"}
    _print_answer(console, "a window that spans two dates", await _asked(urls, both))
    return told


async def _asked(urls: Sequence[str], request: Fields) -> Told:
    return (await load.ask_all(urls[:1], [request], 1))[0]


def _print_answer(console: Console, asked_for: str, told: Told) -> None:
    said = told.body.get("reason") or told.body.get("error")
    console.print(f"who asks for {asked_for} is told {told.status}: {said}", markup=False)


def _print_commands(console: Console, store: str) -> None:
    console.print("\nAsk in which order the requests of a market and day were answered, and by whom:")
    command = f".venv/bin/keywise serial history {SMALL}/{DAYS[0]} --app examples/scheduling/desk.py:app"
    place = "" if store == file_in(FOLDER) else f"{STORE_VARIABLE}={store} "
    console.print(f"  {place}{command}", style="cyan")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Accept care requests if they are feasible, naively and one at a time per market and day.",
        epilog="example: .venv/bin/python examples/scheduling/main.py --servers --requests 1000 --callers 64",
    )
    parser.add_argument("--requests", type=load.positive, default=300, help="how many care requests there are")
    parser.add_argument("--callers", type=load.positive, default=32, help="how many ask at once")
    parser.add_argument("--desks", type=load.positive, default=2, help="how many processes answer")
    parser.add_argument("--seed", type=int, default=2024, help="what the callers ask for")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the SQLite file is made afresh")
    parser.add_argument("--servers", action="store_true", help="start a Postgres for it")
    parser.add_argument("--store", default="", help="or the URL of one, whose scheduling_visits are deleted")
    parser.add_argument(
        "--turns", default="", choices=TURNS, help="how calls wait on Postgres; postgres-lock without it"
    )
    options = parser.parse_args()
    if options.turns and not (options.servers or options.store.startswith("postgres")):
        parser.error(f"--turns {options.turns} needs a Postgres; add --servers, or its URL with --store")
    return options


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except (schedule.ScheduleError, processes.DeskError, load.NoAnswerError) as error:
        sys.exit(str(error))
