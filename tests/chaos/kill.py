"""Kills real workers at random moments, way after way, and judges what they leave in the store."""

import argparse
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Column, Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos.hunt import WAYS, Plan, Tally, hunt

FIGURES: dict[str, Callable[[Tally], object]] = {
    "kills": lambda tally: tally.kills,
    "kills inside a batch": lambda tally: tally.kills_inside,
    "pauses": lambda tally: tally.pauses,
    "changes sent": lambda tally: tally.sent,
    "writes": lambda tally: tally.verdict.writes,
    "applied twice": lambda tally: len(tally.verdict.twice),
    "written again (plain sinks may)": lambda tally: tally.verdict.repeated,
    "lost": lambda tally: len(tally.verdict.lost),
    "older after newer": lambda tally: len(tally.verdict.backwards),
    "takeovers": lambda tally: tally.verdict.takeovers,
    "takeovers without suspicion": lambda tally: len(tally.verdict.unsuspected),
    "repairs": lambda tally: tally.repairs,
    "suspects left": lambda tally: tally.suspects_left,
    "dead letters": lambda tally: tally.dead_letters,
    "seconds": lambda tally: round(tally.seconds),
}
SECONDS_A_KILL = 10.0
"""However unlucky the moments are, a run ends."""


def main() -> int:
    options = _options()
    console = Console(stderr=True)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1_000_000)
    console.print(f"seed {seed}")
    tallies = [_run(way, options.kills, options.pauses, seed, console) for way in options.way or WAYS]
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


def _run(way: str, kills: int, pauses: float, seed: int, console: Console) -> Tally:
    plan = Plan(kills, seed, pauses=pauses, limit_s=max(60.0, kills * SECONDS_A_KILL))
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
    table = Table("", *(Column(tally.way, justify="right") for tally in tallies))
    for name, figure in FIGURES.items():
        table.add_row(name, *(str(figure(tally)) for tally in tallies))
    Console().print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="kills that have to fall inside an open batch, each way")
    parser.add_argument("--pauses", type=float, default=0.25, help="share of moments with SIGSTOP instead of SIGKILL")
    parser.add_argument("--way", action="append", choices=WAYS, help="only this way; may be given several times")
    parser.add_argument("--seed", type=int, help="of the moments and the messages; a run is not repeated exactly by it")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there, too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
