"""Kills workers of a reindex while rows are edited, and judges every write; measures live updates beside it, too."""

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

from chaos.reindex_hunt import PHASES, ReindexHuntPlan, ReindexTally, hunt_reindex
from keywise.core.clock import boot_time
from keywise.reindex.report import RunReport
from servers.opensearch import opensearch_server
from servers.postgres import postgres_server

SINKS = ("postgres", "opensearch")
REPORT_EVERY_S = 10.0
FIGURES: dict[str, Callable[[ReindexTally], object]] = {
    "rows": lambda tally: tally.rows,
    "rows/s of the first run": lambda tally: round(tally.rows / tally.fill_s),
    "rows/s with kills and edits": lambda tally: round(tally.rows / tally.run_s),
    "kills": lambda tally: tally.kills,
    "pages": lambda tally: tally.pages,
    "rows of a page": lambda tally: tally.page_rows,
    "rows read again after a kill": lambda tally: tally.rows_again,
    "rows read again for each kill": lambda tally: round(tally.rows_again / tally.kills) if tally.kills else "",
    "rows read again without a kill": lambda tally: tally.rows_again_alive,
    "rows left to the sweep": lambda tally: tally.postponed,
    "live updates": lambda tally: tally.updates,
    **{f"live updates/s {one}": lambda tally, one=one: _shown(tally.updates_per_s, one, ".0f") for one in PHASES},
    **{f"live p99 {one}, s": lambda tally, one=one: _shown(tally.p99_s, one, ".3f") for one in PHASES},
    "writes": lambda tally: tally.writes,
    "written again": lambda tally: tally.repeated,
    "dead letters": lambda tally: tally.dead_letters,
    "faults": lambda tally: len(tally.faults),
}


def main() -> int:
    options = _options()
    console = Console(stderr=True)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1_000_000)
    console.print(f"seed {seed}")
    plan = ReindexHuntPlan(
        rows=options.rows,
        row_bytes=options.row_bytes,
        workers=options.workers,
        every_s=options.every,
        updates_per_s=options.updates,
        live_s=options.live,
        lease_s=options.lease,
        seed=seed,
        limit_s=options.limit,
    )
    tallies = [_run(on, plan, console) for on in options.on or SINKS]
    _show(tallies)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode({"seed": seed, "runs": tallies})))
    faults = [f"{tally.on}: {fault}" for tally in tallies for fault in tally.faults[:20]]
    faults += [f"{tally.on}: no worker was killed" for tally in tallies if not tally.kills]
    for fault in faults:
        console.print(fault, markup=False)
    return 1 if faults else 0


def _run(on: str, plan: ReindexHuntPlan, console: Console) -> ReindexTally:
    reported_at = 0.0

    def report(tally: ReindexTally, now: RunReport) -> None:
        nonlocal reported_at
        if boot_time() >= reported_at + REPORT_EVERY_S:
            reported_at = boot_time()
            done = f"run {now.run.generation}, {now.run.state}: {now.rows_read} rows read"
            console.print(f"{on}: {done}, {tally.kills} kills, {tally.updates} live updates", soft_wrap=True)

    # On disk: the rows, the queue and the log of all writes have gigabytes.
    with tempfile.TemporaryDirectory() as folder, postgres_server(None, fsync="off") as postgres:
        if on == "postgres":
            return asyncio.run(hunt_reindex(Path(folder), plan, postgres.url, report=report))
        with opensearch_server(None) as opensearch:
            return asyncio.run(hunt_reindex(Path(folder), plan, postgres.url, opensearch, report))


def _shown(figures: dict[str, float], phase: str, form: str) -> str:
    return format(figures[phase], form) if phase in figures else ""


def _show(tallies: list[ReindexTally]) -> None:
    table = Table("", *(Column(tally.on, justify="right") for tally in tallies))
    for name, figure in FIGURES.items():
        table.add_row(name, *(str(figure(tally)) for tally in tallies))
    Console().print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--row-bytes", type=int, default=200)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--every", type=float, default=1.0, help="the number of seconds between two kills")
    parser.add_argument("--lease", type=float, default=2.0, help="in seconds; a busy machine needs more")
    parser.add_argument("--updates", type=float, default=500.0, help="live updates per second")
    parser.add_argument("--live", type=float, default=20.0, help="measure the live p99 so long, without and with a run")
    parser.add_argument("--limit", type=float, default=3600.0, help="the number of seconds that a run may take")
    parser.add_argument("--on", action="append", choices=SINKS, help="only this sink; may be given several times")
    parser.add_argument("--seed", type=int, help="of the victims and the edits; a run is not repeated exactly by it")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there, too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
