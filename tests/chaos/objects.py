"""Kills workers of an object pipeline at random moments, and judges what is left of each object in its sink."""

import argparse
import random
import sys
import tempfile
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Column, Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos.object_hunt import ObjectPlan, ObjectSizes, ObjectTally, hunt_objects
from keywise.core.clock import boot_time
from servers.opensearch import opensearch_server
from servers.postgres import postgres_server

SINKS = ("postgres", "opensearch")
REPORT_EVERY_S = 10.0


def main() -> int:
    options = _options()
    console = Console(stderr=True)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1_000_000)
    console.print(f"seed {seed}")
    sizes = ObjectSizes(
        small=options.small, medium=options.medium, large=options.large, large_records=options.large_records
    )
    tallies = []
    for on in options.on or SINKS:
        plan = ObjectPlan(
            kills=options.kills,
            sizes=sizes,
            workers=options.workers,
            every_s=options.every,
            concurrency=options.concurrency,
            seed=seed,
        )
        tallies.append(_run(on, plan, console))
    _show(tallies)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode({"seed": seed, "runs": tallies})))
    faults = [f"{tally.on}: {fault}" for tally in tallies for fault in tally.faults[:20]]
    faults += [f"{one.on}: only {one.kills} kills" for one in tallies if one.kills < options.kills]
    for fault in faults:
        console.print(fault, markup=False)
    return 1 if faults else 0


def _run(on: str, plan: ObjectPlan, console: Console) -> ObjectTally:
    reported_at = 0.0

    def report(tally: ObjectTally, left: int) -> None:
        nonlocal reported_at
        if boot_time() >= reported_at + REPORT_EVERY_S:
            reported_at = boot_time()
            console.print(f"{on}: {tally.kills} kills, {left} messages left", soft_wrap=True)

    # On disk: the objects and the rows have gigabytes.
    with tempfile.TemporaryDirectory() as folder, postgres_server(None, fsync="off") as postgres:
        if on == "postgres":
            return hunt_objects(Path(folder), plan, postgres, report=report)
        with opensearch_server(None) as opensearch:
            return hunt_objects(Path(folder), plan, postgres, opensearch, report)


def _show(tallies: list[ObjectTally]) -> None:
    table = Table("", *(Column(tally.on, justify="right") for tally in tallies))
    for name in ("kills", "objects", "records", "takeovers", "repeated", "dead_letters"):
        table.add_row(name.replace("_", " "), *(str(getattr(tally, name)) for tally in tallies))
    table.add_row("seconds", *(str(round(tally.seconds)) for tally in tallies))
    Console().print(table)


def _options() -> argparse.Namespace:
    parser, sizes = argparse.ArgumentParser(description=__doc__), ObjectSizes()
    parser.add_argument("--kills", type=int, default=100, help="of workers, at random moments")
    parser.add_argument("--every", type=float, default=0.8, help="the mean number of seconds between two kills")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=4, help="how many objects a worker reads at a time")
    parser.add_argument("--small", type=int, default=sizes.small, help="objects of 10 records")
    parser.add_argument("--medium", type=int, default=sizes.medium, help="objects of 5 MB")
    parser.add_argument("--large", type=int, default=sizes.large, help="large objects")
    parser.add_argument("--large-records", type=int, default=sizes.large_records, help="records of 1 kB in each")
    parser.add_argument("--on", action="append", choices=SINKS, help="only this sink; may be given several times")
    parser.add_argument("--seed", type=int, help="of the moments; a run is not repeated exactly by it")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there, too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
