"""What a run has made of the schedule, beside what the callers were told."""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
from examples.scheduling.care import CARS, Visit, clashes
from examples.scheduling.load import DAYS, Told, percentile_ms
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

ACCEPTED, NO = 200, 409

Key = tuple[str, str]


class Run(msgspec.Struct, frozen=True):
    """One way to answer, the schedule that it has left, and all that was told."""

    name: str
    visits: Sequence[Visit]
    told: Sequence[Told]

    @property
    def accepted(self) -> Counter[Key]:
        """Visits in the schedule, by market and day."""
        return Counter((visit.market, visit.day) for visit in self.visits)

    @property
    def refused(self) -> Counter[Key]:
        """Requests that were told no, by market and day."""
        refused = {one.request["id"]: _key(one) for one in self.told if one.status == NO}
        return Counter(refused.values())

    @property
    def overbooked(self) -> Counter[Key]:
        """Visits whose car is at another one, by market and day."""
        return Counter((visit.market, visit.day) for visit in clashes(self.visits))

    @property
    def twice(self) -> list[str]:
        """Requests that have more than one visit."""
        return [id for id, count in Counter(visit.id for visit in self.visits).items() if count > 1]

    @property
    def misled(self) -> list[str]:
        """Requests whose callers were told something else than the schedule says, or different things."""
        booked: dict[str, set[int]] = {one.request["id"]: set() for one in self.told}
        for visit in self.visits:
            booked.setdefault(visit.id, set()).add(visit.car)
        told: dict[str, set[int]] = {}
        for one in self.told:
            told.setdefault(one.request["id"], set()).update({one.body["car"]} if one.status == ACCEPTED else ())
        different = _told_both(self.told)
        return [id for id in booked if id in different or booked[id] != told.get(id)]

    @property
    def failed(self) -> list[Told]:
        """Calls without a decision."""
        return [one for one in self.told if one.status not in (ACCEPTED, NO)]

    @property
    def is_right(self) -> bool:
        return not (self.overbooked or self.twice or self.misled or self.failed)


def print_report(console: Console, runs: Sequence[Run]) -> None:
    """Print what each run has made of each market and day, and then of all of them."""
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("market", "day"):
        table.add_column(heading, no_wrap=True)
    for run in runs:
        for heading in ("accepted", "refused", "overlap"):
            table.add_column(f"{run.name}\n{heading}", justify="right", no_wrap=True)
    for key in [(market, day) for market in CARS for day in DAYS]:
        table.add_row(*key, *(cell for run in runs for cell in _cells(run, key)))
    console.print(table)
    for run in runs:
        console.print(summary(run), style="bold")
    for one in [one for run in runs for one in run.failed][:5]:
        console.print(f"  no decision, status {one.status}: {one.body.get('error')}", style="red", markup=False)


def summary(run: Run) -> str:
    overbooked = f"overbooked in {len(run.overbooked)} of {len(CARS) * len(DAYS)} markets and days"
    faults = f"{len(run.twice)} requests booked twice, {len(run.misled)} callers told what is not so"
    times = f"p50 {percentile_ms(run.told, 0.5):.0f} ms, p99 {percentile_ms(run.told, 0.99):.0f} ms"
    return f"{run.name}: {overbooked}, {faults}; {times} of {len(run.told):,} calls"


def _cells(run: Run, key: Key) -> Iterable[str]:
    overbooked = run.overbooked[key]
    shown = f"[red]{overbooked}[/red]" if overbooked else "[green]0[/green]"
    return str(run.accepted[key]), str(run.refused[key]), shown


def _key(told: Told) -> Key:
    return told.request["market"], told.request["earliest"][:10]


def _told_both(told: Iterable[Told]) -> set[str]:
    """Requests that were told yes and no, or two different times."""
    first: dict[str, object] = {}
    return {one.request["id"] for one in told if first.setdefault(one.request["id"], one.body) != one.body}
