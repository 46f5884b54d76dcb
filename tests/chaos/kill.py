"""Kills and stops real workers and restarts their server, way after way, and judges what is left in the store."""

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Column, Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos.hunt import WAYS, Plan, Tally, hunt
from chaos.postgres_backend import PostgresShelf
from chaos.rabbitmq_backend import RabbitShelf
from chaos.redis_backend import RedisShelf
from chaos.sqlite_backend import SqliteShelf
from chaos.store import Shelf
from keywise.core.clock import boot_time
from servers.postgres import postgres_server
from servers.rabbitmq import rabbit_server
from servers.redis import redis_server

FIGURES: dict[str, Callable[[Tally], object]] = {
    "kills": lambda tally: tally.kills,
    "kills inside a batch": lambda tally: tally.kills_inside,
    "stops past the lease": lambda tally: tally.stops,
    "restarts of the server": lambda tally: tally.restarts,
    "cuts of all connections": lambda tally: tally.cuts,
    "changes sent": lambda tally: tally.sent,
    "writes": lambda tally: tally.verdict.writes,
    "applied twice": lambda tally: len(tally.verdict.twice),
    "written again (plain sinks may)": lambda tally: tally.verdict.repeated,
    "lost": lambda tally: len(tally.verdict.lost),
    "older after newer": lambda tally: len(tally.verdict.backwards),
    "older after newer, and nobody saw": lambda tally: tally.verdict.unseen,
    "takeovers": lambda tally: tally.verdict.takeovers,
    "takeovers without suspicion": lambda tally: len(tally.verdict.unsuspected),
    "repairs": lambda tally: tally.repairs,
    "suspects left": lambda tally: tally.suspects_left,
    "dead letters": lambda tally: tally.dead_letters,
    "seconds": lambda tally: round(tally.seconds),
}
SECONDS_A_TIME = 30.0
"""However unlucky the moments are, a run ends."""
TELL_EVERY_S = 10.0


@contextmanager
def _on_sqlite(folder: Path) -> Iterator[Shelf]:
    yield SqliteShelf(folder)


@contextmanager
def _on_postgres(folder: Path) -> Iterator[PostgresShelf]:
    with postgres_server() as server:
        yield PostgresShelf(server)


@contextmanager
def _on_redis(folder: Path) -> Iterator[Shelf]:
    with _on_postgres(folder) as beside, redis_server() as server:
        yield RedisShelf(server, beside)


@contextmanager
def _on_rabbitmq(folder: Path) -> Iterator[Shelf]:
    with rabbit_server() as server:
        yield RabbitShelf(server, SqliteShelf(folder))


SHELVES = {"sqlite": _on_sqlite, "postgres": _on_postgres, "redis": _on_redis, "rabbitmq": _on_rabbitmq}
# A ledger in Redis shares no transaction with a table.
PLACES = [(on, way) for on in SHELVES for way in WAYS if on != "redis" or way == "leased"]


def main() -> int:
    options = _options()
    console = Console(stderr=True)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1_000_000)
    console.print(f"seed {seed}")
    places = [(on, way) for on, way in PLACES if on in (options.on or SHELVES) and way in (options.way or WAYS)]
    plans = [_plan(on, options.times, seed) for on, _ in places]
    tallies = [_run(on, way, plan, console) for (on, way), plan in zip(places, plans, strict=True)]
    if len(tallies) > 1:
        _show(tallies)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode({"seed": seed, "runs": tallies})))
    faults = [fault for tally, plan in zip(tallies, plans, strict=True) for fault in _faults(tally, plan)]
    for fault in faults:
        console.print(fault, markup=False)
    return 1 if faults else 0


def _plan(on: str, times: int, seed: int) -> Plan:
    restarts = 0 if on == "sqlite" else times
    cuts = times if on == "rabbitmq" else 0
    return Plan(times, times, restarts, cuts, seed, limit_s=max(60.0, times * SECONDS_A_TIME))


def _run(on: str, way: str, plan: Plan, console: Console) -> Tally:
    told_at = 0.0

    def tell(tally: Tally) -> None:
        nonlocal told_at
        if boot_time() < told_at + TELL_EVERY_S:
            return
        told_at = boot_time()
        console.print(
            f"{on}, {way}: {tally.kills_inside} kills inside a batch ({tally.kills} in all), {tally.stops} stops, "
            f"{tally.restarts} restarts, {tally.sent} sent",
            soft_wrap=True,
        )

    with tempfile.TemporaryDirectory() as folder, SHELVES[on](Path(folder)) as shelf:
        tally = hunt(Path(folder), way, plan, shelf, tell)
    # At once: the whole run takes hours, and may be broken off.
    _show([tally])
    return tally


def _faults(tally: Tally, plan: Plan) -> list[str]:
    too_few = [f"too few {what}" for what in tally.lacking(plan)]
    return [f"{tally.on}, {tally.way}: {fault}" for fault in (*tally.faults[:20], *too_few)]


def _show(tallies: list[Tally]) -> None:
    table = Table("", *(Column(f"{tally.on}\n{tally.way}", justify="right") for tally in tallies))
    for name, figure in FIGURES.items():
        table.add_row(name, *(str(figure(tally)) for tally in tallies))
    Console().print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    times = "kills inside an open batch, stops past the lease, and restarts of the server: so many of each, each way"
    parser.add_argument("--times", type=int, default=100, help=times)
    parser.add_argument("--on", action="append", choices=SHELVES, help="only there; may be given several times")
    parser.add_argument("--way", action="append", choices=WAYS, help="only this way; may be given several times")
    parser.add_argument("--seed", type=int, help="of the moments and the messages; a run is not repeated exactly by it")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there, too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
