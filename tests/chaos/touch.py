"""Kills workers that touch every row of a DynamoDB table again, while it throttles and rows change; judges each row."""

import argparse
import asyncio
import os
import random
import sys
import tempfile
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from adapters.aws_credentials import CREDENTIALS
from chaos.touch_story import TouchPlan, TouchTally, play
from keywise.core.clock import boot_time
from keywise.reindex.report import RunReport
from servers.dynamodb import dynamodb_server
from servers.postgres import postgres_server

REPORT_EVERY_S = 10.0
SHOWN_MAX = 20


def main() -> int:
    options = _options()
    console = Console(stderr=True)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1_000_000)
    console.print(f"seed {seed}")
    plan = TouchPlan(
        shards=options.shards,
        rows_per_shard=options.rows,
        poisoned=options.poisoned,
        kills=options.kills,
        every_s=options.every,
        workers=options.workers,
        lease=options.lease,
        seed=seed,
        limit_s=options.limit,
    )
    os.environ |= CREDENTIALS
    tally = _run(plan, console)
    _show(plan, tally)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode({"plan": plan, "run": tally})))
    faults = list(tally.faults)
    if tally.kills < plan.kills:
        faults.append(f"only {tally.kills} kills")
    for fault in faults[:SHOWN_MAX]:
        console.print(fault, markup=False)
    return 1 if faults else 0


def _run(plan: TouchPlan, console: Console) -> TouchTally:
    reported_at = 0.0

    def report(now: RunReport, tally: TouchTally) -> None:
        nonlocal reported_at
        if boot_time() >= reported_at + REPORT_EVERY_S:
            reported_at = boot_time()
            text = f"{now.run.state.value}: {tally.kills} kills, {now.rows_read:,} of {plan.rows:,} rows"
            console.print(text, soft_wrap=True)

    with (
        tempfile.TemporaryDirectory() as folder,
        postgres_server(None, fsync="off") as postgres,
        dynamodb_server(None) as dynamodb,
    ):
        ledger = postgres.create_database("touch")
        return asyncio.run(play(Path(folder), dynamodb, ledger, plan, report))


def _show(plan: TouchPlan, tally: TouchTally) -> None:
    table = Table("", "dynamodb")
    table.add_row("rows", f"{plan.rows:,}")
    for name in ("kills", "touches", "throttled", "edits", "scans", "restarted", "dead_letters", "untouched"):
        table.add_row(name.replace("_", " "), f"{getattr(tally, name):,}")
    table.add_row("counts", ", ".join(f"{name} {count:,}" for name, count in tally.counts.items()))
    table.add_row("looks", ", ".join(f"{stage} {count:,}" for stage, count in tally.stages.items()))
    table.add_row("seconds", str(round(tally.seconds)))
    Console().print(table)


def _options() -> argparse.Namespace:
    parser, plan = argparse.ArgumentParser(description=__doc__), TouchPlan()
    parser.add_argument("--shards", type=int, default=plan.shards)
    parser.add_argument("--rows", type=int, default=1500, help="of each shard")
    parser.add_argument("--poisoned", type=int, default=plan.poisoned, help="rows that cannot be read")
    parser.add_argument("--kills", type=int, default=20, help="of workers, at random moments")
    parser.add_argument("--every", type=float, default=15.0, help="the mean number of seconds between two kills")
    parser.add_argument("--workers", type=int, default=plan.workers)
    parser.add_argument("--lease", default="10s", help="of keys and shards; each kill costs about one")
    parser.add_argument("--limit", type=float, default=3600.0, help="how many seconds the run may take")
    parser.add_argument("--seed", type=int, help="of the moments; a run is not repeated exactly by it")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there, too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
