"""Runs keywise and its peers on the same changes by turns, prints one table and writes build/peers.json."""

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import asyncpg
import msgspec
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import machine
from benchmarks.machine import ROOT
from benchmarks.peers import page, processes
from benchmarks.peers.contenders import CONTENDERS, ONE_CHANGE, THEIRS, Contender
from benchmarks.peers.place import Handler, Place
from benchmarks.peers.race import Turn, log_file, postmaster_of, run_turn
from benchmarks.peers.report import Report, Row

sys.path.insert(0, str(ROOT / "tests"))

from servers.postgres import PostgresServer, postgres_server
from servers.redis import RedisServer, find_program, redis_server

KEYS, ROUNDS = (10_000, 1_000), 3
BUSY = 0.1
SNAPSHOTS = "3600 1 300 100 60 10000"
"""As Redis saves by itself: after so many seconds, if so many keys have changed."""
SHOWN_VERSIONS = ("procrastinate", "dbos", "pgqueuer", "dramatiq", "asyncpg", "psycopg", "redis")


def main() -> int:
    options = _options()
    console = Console(width=None if sys.stdout.isatty() else 220, highlight=False)
    if options.read is not None:
        report = msgspec.json.decode(options.read.read_bytes(), type=Report)
    else:
        report = Course(console, options).run()
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    show(console, report)
    if options.write is not None:
        page.write_page(options.write, report)
    return 0


class Course:
    """All turns of all contenders, on one Postgres and one Redis."""

    def __init__(self, console: Console, options: argparse.Namespace) -> None:
        self._console = console
        self._options = options
        self._postgres: PostgresServer
        self._redis: RedisServer | None = None
        self._rows = list(_rows(options))

    def run(self) -> Report:
        with ExitStack() as stack:
            # On a disk and with the settings that it comes with, as the Redis too.
            self._postgres = stack.enter_context(postgres_server(None))
            if any(row.contender.needs_redis for row in self._rows):
                self._redis = stack.enter_context(redis_server(None, appendonly="no", save=SNAPSHOTS))
            with Others(self._servers()) as others:
                for number in range(self._options.rounds):
                    for place, row in enumerate(self._rows):
                        row.turns.append(self._turn(row, f"turn_{number}_{place}"))
            report = self._report(others.share)
            sampled = [row for row in self._rows if row.contender.name == ONE_CHANGE and row.handler is Handler.UPSERT]
            for row in sampled[:1]:
                report.shares = self._turn(row, "sampled", is_sampled=True).shares
            return report

    def _turn(self, row: Row, name: str, *, is_sampled: bool = False) -> Turn:
        contender = row.contender
        if self._redis is not None:
            self._redis.command("FLUSHALL")
        with log_file() as log:
            place = Place(
                self._postgres.create_database(name),
                self._redis.url if self._redis is not None else "",
                log,
                contender.changes,
                row.keys,
                self._options.distribution,
                contender.settings,
                row.handler,
                is_sampled,
            )
            turn = run_turn(contender, place, self._servers())
        what = f"{contender.name}, {row.handler}, {row.keys:,} keys"
        of_what = ", where its time goes" if is_sampled else ""
        calls = (
            "" if turn.verdict.calls is None else f", {turn.verdict.calls:,} calls for {contender.changes:,} messages"
        )
        self._console.print(f"{what}{of_what}: {turn.changes_per_s:,.0f} changes/s{calls}", style="dim")
        return turn

    def _servers(self) -> set[int]:
        """The processes that started all others of a server."""
        redis = {self._redis.pid} if self._redis is not None else set()
        return {asyncio.run(postmaster_of(self._postgres.url))} | redis

    def _report(self, others: float) -> Report:
        versions = {"PostgreSQL": asyncio.run(_postgres_version(self._postgres.url))}
        if self._redis is not None:
            versions["Redis"] = _redis_version()
        options = self._options
        return Report(
            machine.this_machine(),
            versions | _pinned(),
            options.distribution,
            options.rounds,
            others,
            machine.load(),
            self._rows,
        )


class Others(machine.Bystander):
    """How much of the machine others use; our servers are no others."""

    def __init__(self, servers: set[int]) -> None:
        self._servers = servers

    def __enter__(self) -> Self:
        self._started, self._server_s = time.monotonic(), self._of_servers()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        capacity_s = (time.monotonic() - self._started) * machine.this_machine().cpus
        self.share = max(0.0, self.others - (self._of_servers() - self._server_s) / capacity_s)

    def _of_servers(self) -> float:
        return sum(map(processes.family_cpu_s, self._servers))


def show(console: Console, report: Report) -> None:
    """The tables and the ratios."""
    for group in report.groups:
        table = Table(*page.HEADS, title=group.name, box=None, pad_edge=False)
        for column in table.columns[2:]:
            column.justify = "right"
        for row in group.rows:
            table.add_row(*page.cells(row))
        console.print(table)
        for figure in group.ratios():
            met = {None: "", True: "[green]met[/]", False: "[red]missed[/]"}[figure.is_met]
            more = f"{figure.note}; of CPU time {figure.detail['of_cpu_time']}"
            console.print(f"{figure.name}, {group.name}: {figure.shown} {figure.target} {met} ({more})")
    console.print(f"others used {report.others:.0%} of the CPUs; load {report.load}")
    if report.others > BUSY:
        console.print("The machine was busy with other work: measure again before you quote a figure.", style="yellow")


def _rows(options: argparse.Namespace) -> Iterator[Row]:
    """Rows that are compared stand side by side, so that their turns follow each other."""
    for handler in options.handler or Handler:
        for keys in options.keys or KEYS:
            for contender in CONTENDERS:
                if _is_chosen(contender, options) and (chosen := contender.with_handler(handler)) is not None:
                    yield Row(_changed(chosen, options), handler, keys, [])


def _is_chosen(contender: Contender, options: argparse.Namespace) -> bool:
    if not contender.is_ours and not THEIRS.exists():
        return False
    return not options.only or contender.name in options.only


def _changed(contender: Contender, options: argparse.Namespace) -> Contender:
    """What the command line says instead of the settings that are written down, to find better ones."""
    settings = dict(contender.settings)
    for name, _, value in (one.partition("=") for one in options.set):
        if name in settings:
            settings[name] = type(settings[name])(value)
    return msgspec.structs.replace(
        contender,
        settings=settings,
        processes=options.processes or contender.processes,
        changes=min(contender.changes, options.changes),
    )


async def _postgres_version(url: str) -> str:
    connection = await asyncpg.connect(url)
    try:
        return str(await connection.fetchval("show server_version")).split()[0]
    finally:
        await connection.close()


def _redis_version() -> str:
    told = subprocess.run([find_program(), "--version"], capture_output=True, text=True, check=True).stdout
    return told.partition("v=")[2].split()[0]


def _pinned() -> dict[str, str]:
    """The versions of the peers and of the clients that write."""
    lines = (ROOT / "benchmarks" / "peers" / "requirements.txt").read_text().splitlines()
    pins = dict(line.split()[0].split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name: pins[name] for name in SHOWN_VERSIONS}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only",
        action="append",
        choices=[one.name for one in CONTENDERS],
        help="just this contender; can be given again",
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each contender")
    parser.add_argument("--changes", type=int, default=10**9, help="no contender gets more than so many")
    parser.add_argument("--handler", action="append", type=Handler, choices=list(Handler), help="just this handler")
    parser.add_argument(
        "--keys", action="append", type=int, help="10,000 and then 1,000 unless given; can be given again"
    )
    parser.add_argument("--distribution", choices=["uniform", "zipf"], default="uniform")
    parser.add_argument("--processes", type=int, help="of each contender, to find better settings")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting, likewise")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "peers.json", help="where the data goes")
    parser.add_argument("--read", type=Path, metavar="PATH", help="run nothing, take the data of an earlier run")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="renew the part of this page, and its plots")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
