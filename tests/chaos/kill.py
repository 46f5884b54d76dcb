"""Kills real workers at random moments, way after way, and judges what they leave in the store."""

import argparse
import random
import sys
import tempfile
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos.hunt import WAYS, Plan, Tally, hunt

COLUMNS = (
    "way",
    "kills",
    "inside a batch",
    "changes sent",
    "writes",
    "applied twice",
    "lost",
    "older after newer",
    "takeovers",
    "repairs",
    "dead letters",
    "seconds",
)
SECONDS_A_KILL = 10.0
"""However unlucky the moments are, a run ends."""


def main() -> int:
    options = _options()
    console = Console(stderr=True)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1_000_000)
    console.print(f"seed {seed}")
    tallies = [_run(way, options.kills, seed, console) for way in options.way or WAYS]
    _show(tallies)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode({"seed": seed, "ways": tallies})))
    too_few = [tally for tally in tallies if tally.kills_inside < options.kills]
    for tally in tallies:
        for fault in tally.faults[:20]:
            console.print(f"{tally.way}: {fault}", markup=False)
    for tally in too_few:
        console.print(f"{tally.way}: only {tally.kills_inside} kills fell inside a batch")
    return 1 if too_few or any(tally.faults for tally in tallies) else 0


def _run(way: str, kills: int, seed: int, console: Console) -> Tally:
    plan = Plan(kills, seed, limit_s=max(60.0, kills * SECONDS_A_KILL))
    with tempfile.TemporaryDirectory() as folder, console.status(way) as status:

        def tell(tally: Tally) -> None:
            told = (
                f"{way}: {tally.kills_inside} of {kills} kills inside a batch, {tally.kills} in all, {tally.sent} sent"
            )
            if console.is_terminal:
                status.update(told)
            elif tally.kills % 20 == 0:
                console.print(told)

        return hunt(Path(folder), way, plan, tell)


def _show(tallies: list[Tally]) -> None:
    table = Table(*COLUMNS)
    for column in table.columns[1:]:
        column.justify = "right"
    for tally in tallies:
        verdict = tally.verdict
        # A plain sink promises no more than that a repeated write is the same write.
        twice = (
            f"{len(verdict.twice)}" if tally.way != "leased" else f"{len(verdict.twice)} (+{verdict.repeated} allowed)"
        )
        figures = (
            tally.kills,
            tally.kills_inside,
            tally.sent,
            verdict.writes,
            twice,
            len(verdict.lost),
            len(verdict.backwards),
            verdict.takeovers,
            tally.repairs,
            tally.dead_letters,
            round(tally.seconds),
        )
        table.add_row(tally.way, *map(str, figures))
    Console().print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="kills that have to fall inside an open batch, each way")
    parser.add_argument("--way", action="append", choices=WAYS, help="only this way; may be given several times")
    parser.add_argument("--seed", type=int, help="of the moments and the messages; a run is not repeated exactly by it")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there, too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
