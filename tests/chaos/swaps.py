"""Moves the name of a sink there and back while rows are edited and workers are killed and stopped, and judges it."""

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Column, Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos.swap_hunt import SwapPlan, SwapTally, hunt_swaps
from chaos.swap_stores import SqliteTables, opensearch_indexes, postgres_tables
from keywise.core.clock import boot_time
from servers.opensearch import opensearch_server
from servers.postgres import postgres_server

STORES = ("sqlite", "postgres", "opensearch")
REPORT_EVERY_S = 10.0
FIGURES: dict[str, Callable[[SwapTally], object]] = {
    "swaps": lambda tally: tally.swaps,
    "rollbacks": lambda tally: tally.rollbacks,
    "called off": lambda tally: tally.called_off,
    "kills": lambda tally: tally.kills,
    "kills of the worker that swaps": lambda tally: tally.coordinator_kills,
    "stops past the lease": lambda tally: tally.stops,
    "stops of the worker that swaps": lambda tally: tally.coordinator_stops,
    "late calls, all refused": lambda tally: tally.late_calls,
    "live updates": lambda tally: tally.updates,
    "writes": lambda tally: tally.writes,
    "longest barrier, s": lambda tally: f"{tally.barrier_max_s:.2f}",
    "longest wait of a change at a barrier, s": lambda tally: f"{tally.wait_max_s:.2f}",
    "longest lag of the origin, s": lambda tally: f"{tally.lag_max_s:.2f}",
    "seconds": lambda tally: round(tally.seconds),
    "faults": lambda tally: len(tally.faults),
}


def main() -> int:
    options = _options()
    console = Console(stderr=True)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1_000_000)
    console.print(f"seed {seed}")
    plan = SwapPlan(
        moves=options.moves,
        keys=options.keys,
        writers=options.writers,
        updates_per_s=options.updates,
        workers=options.workers,
        every_s=options.every,
        lease_s=options.lease,
        horizon_s=options.horizon,
        seed=seed,
        limit_s=options.limit,
    )
    tallies = [_run(on, plan, console) for on in options.on or STORES]
    _show(tallies)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode({"seed": seed, "runs": tallies})))
    faults = [f"{tally.on}: {fault}" for tally in tallies for fault in tally.faults[:20]]
    for fault in faults:
        console.print(fault, markup=False)
    return 1 if faults else 0


def _run(on: str, plan: SwapPlan, console: Console) -> SwapTally:
    reported_at = 0.0

    def report(tally: SwapTally) -> None:
        nonlocal reported_at
        if boot_time() >= reported_at + REPORT_EVERY_S:
            reported_at = boot_time()
            moves = f"{tally.swaps} swaps, {tally.rollbacks} rollbacks"
            console.print(f"{on}: {moves}, {tally.kills} kills, {tally.stops} stops", soft_wrap=True)

    with tempfile.TemporaryDirectory() as folder:
        tally = asyncio.run(_hunt(on, Path(folder), plan, report))
    for cause, times in sorted(tally.causes.items()):
        console.print(f"{on}: {times} times {cause}", markup=False, soft_wrap=True)
    return tally


async def _hunt(on: str, folder: Path, plan: SwapPlan, report: Callable[[SwapTally], None]) -> SwapTally:
    if on == "sqlite":
        return await hunt_swaps(folder, plan, SqliteTables(folder / "swaps.sqlite"), report)
    with postgres_server() as postgres:
        if on == "postgres":
            async with postgres_tables(postgres.url) as tables:
                return await hunt_swaps(folder, plan, tables, report)
        with opensearch_server() as opensearch:
            async with opensearch_indexes(postgres.url, opensearch) as indexes:
                return await hunt_swaps(folder, plan, indexes, report)


def _show(tallies: list[SwapTally]) -> None:
    table = Table("", *(Column(tally.on, justify="right") for tally in tallies))
    for name, figure in FIGURES.items():
        table.add_row(name, *(str(figure(tally)) for tally in tallies))
    Console().print(table)


def _options() -> argparse.Namespace:
    parser, plan = argparse.ArgumentParser(description=__doc__), SwapPlan()
    parser.add_argument("--moves", type=int, default=plan.moves, help="swaps and rollbacks together")
    parser.add_argument("--keys", type=int, default=plan.keys)
    parser.add_argument("--writers", type=int, default=plan.writers)
    parser.add_argument("--updates", type=float, default=plan.updates_per_s, help="per second, of all writers")
    parser.add_argument("--workers", type=int, default=plan.workers)
    parser.add_argument("--every", type=float, default=plan.every_s, help="the mean number of seconds between two hits")
    parser.add_argument("--lease", type=float, default=plan.lease_s, help="in seconds; a busy machine needs more")
    parser.add_argument("--horizon", type=float, default=plan.horizon_s, help="in seconds; above the lag of the origin")
    parser.add_argument("--limit", type=float, default=plan.limit_s, help="the number of seconds that a hunt may take")
    parser.add_argument("--on", action="append", choices=STORES, help="only this store; may be given several times")
    parser.add_argument("--seed", type=int, help="of the moments and the edits; a run is not repeated exactly by it")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there, too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
