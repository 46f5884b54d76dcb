"""`keywise reconcile`: compares a sink with the source of truth, and repairs differences."""

import json as json_lines
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from keywise.cli.admin_options import WAIT_DEFAULT, AdminOptions, WaitOption, YesOption, confirm, perform
from keywise.cli.options import grouped, require_valid_key
from keywise.cli.output import count, plain, print_error, progress, refuse
from keywise.core.errors import AdminError
from keywise.operate.admin import PipelineAdmin
from keywise.operate.reconcile import Difference, Kind, Reconciler

REPAIRS_MAX = 100_000
"""The most keys that one run repairs: they are kept in memory until the operator has confirmed the repair."""


@grouped
def reconcile(
    *,
    repair: Annotated[
        bool, typer.Option("--repair", help="Write keys that differ again, from the source of truth.")
    ] = False,
    keys_from: Annotated[
        str | None,
        typer.Option("--keys-from", metavar="FILE", help="More keys, one per line or as JSON text; - for stdin."),
    ] = None,
    wait: WaitOption = WAIT_DEFAULT,
    yes: YesOption = False,
    options: AdminOptions,
) -> None:
    """Compare the sink with the source of truth, key by key.

    Reads the truth from refetch or the origin, and the sink directly or with lookup. Keys that change meanwhile do not
    count. With --json each difference is one line, and the last line sums up. Exits with status 1 if something differs.

    \b
    Example:
      keywise reconcile --app shop:app
      keywise reconcile --repair --yes --why 'after the outage' --app shop:app
      keywise reconcile --keys-from ids.txt --json --app shop:app
    """
    if keys_from is not None and keys_from != "-" and not Path(keys_from).is_file():
        refuse(f"there is no file {keys_from!r}; write one key per line, or name - for stdin")
    report = ReconcileReport(options.json)

    async def act(admin: PipelineAdmin) -> Reconciler:
        walk = Reconciler(admin.pipeline)
        known = (await admin.pipeline.admin.counts()).keys
        with progress(TextColumn("{task.completed:,} keys"), BarColumn(), TimeElapsedColumn()) as bar:
            task = bar.add_task("", total=known)
            async for found in walk.differences(_keys(keys_from)):
                report.report(found)
                bar.update(task, completed=walk.keys_compared)
        if repair and report.wrong:
            confirm(f"Write {count(len(report.wrong), 'key')} of {admin.pipeline.name} again?", yes=yes)
            await report.repair(admin)
        return walk

    _, walk = perform(options, act, wait)
    report.sum_up(walk.keys_compared, walk.keys_changing)
    if report.is_wrong:
        raise typer.Exit(1)


class ReconcileReport:
    """Prints the differences and the repairs, and counts them."""

    def __init__(self, json: bool) -> None:
        self.wrong: list[str] = []
        self._json = json
        self._kinds: Counter[Kind] = Counter()
        self._repaired = 0

    @property
    def is_wrong(self) -> bool:
        return sum(self._kinds.values()) > self._repaired

    def report(self, found: Difference) -> None:
        self._kinds[found.kind] += 1
        if found.kind is not Kind.FAILED and len(self.wrong) < REPAIRS_MAX:
            self.wrong.append(found.key)
        self._print(msgspec.to_builtins(found), _format_difference(found))

    async def repair(self, admin: PipelineAdmin) -> None:
        for key in self.wrong:
            try:
                await admin.force(key)
            except AdminError as error:
                self._print({"key": key, "kind": "left", "detail": str(error)}, f"left: {error}")
            else:
                self._repaired += 1
                self._print({"key": key, "kind": "repaired"}, f"repaired {key!r}")

    def sum_up(self, looked: int, changing: int) -> None:
        kinds = {kind.value: number for kind, number in sorted(self._kinds.items())}
        summary = {"looked": looked, "changing": changing, "repaired": self._repaired, "differences": kinds}
        found = sum(kinds.values())
        repaired = f", {self._repaired:,} repaired" if self._repaired else ""
        self._print(summary, f"looked at {count(looked, 'key')}: {count(found, 'difference')}{repaired}")
        if changing and not self._json:
            print(f"{count(changing, 'key')} changed all the time; run it again")
        if self.is_wrong and not self._json:
            left = count(found - self._repaired, "difference")
            print_error(f"{left} left" if self._repaired else f"{left}; to write these keys again, add --repair")

    def _print(self, fields: dict[str, Any], text: str) -> None:
        print(json_lines.dumps(fields) if self._json else plain(text), flush=True)


def _format_difference(found: Difference) -> str:
    versions = [
        f"{name} version {version}"
        for name, version in (("the truth has", found.truth), ("the sink holds", found.held))
        if version is not None
    ]
    more = ": " + "; ".join([*versions, *([found.detail] if found.detail else [])]) if versions or found.detail else ""
    return f"{found.key!r} {'cannot be read' if found.kind is Kind.FAILED else f'is {_KINDS[found.kind]}'}{more}"


_KINDS = {
    Kind.MISSING: "missing in the sink",
    Kind.EXTRA: "in the sink, and should be gone",
    Kind.OLDER: "older in the sink",
    Kind.NEWER: "newer in the sink",
    Kind.DIFFERENT: "different in the sink",
}


def _keys(place: str | None) -> Iterator[str]:
    """Yield the keys of a file, one per line. A key with line breaks or quotes is written as JSON text."""
    if place is None:
        return
    with nullcontext(sys.stdin) if place == "-" else Path(place).open(encoding="utf-8") as lines:
        for line in lines:
            if text := line.rstrip("\n"):
                yield require_valid_key(_unquoted(text))


def _unquoted(text: str) -> str:
    if not text.startswith('"'):
        return text
    try:
        return str(msgspec.json.decode(text, type=str))
    except (msgspec.MsgspecError, UnicodeError):
        return text
