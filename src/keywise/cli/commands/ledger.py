"""`keywise ledger`: lists the pipelines of a ledger, and copies them to another server or technology."""

import asyncio
import os
import shlex
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from keywise import adapters
from keywise.app import App
from keywise.cli.admin_options import WhoOption, WhyOption, YesOption, audit_note, confirm
from keywise.cli.app_loader import AppOption, JsonOption, load
from keywise.cli.commands.pause import print_note
from keywise.cli.group import CommandGroup
from keywise.cli.options import grouped, suggestion
from keywise.cli.output import count, duration, fail, plain, print_json, print_table, progress, refuse
from keywise.core.admin import LedgerCounts
from keywise.core.entry import LedgerPolicy
from keywise.core.errors import AdminError
from keywise.core.ledger import TransferableLedger
from keywise.core.url import Address, redacted
from keywise.operate.admin import AuditNote
from keywise.operate.copy_ledger import Checksums, LedgerCopy, LedgerHandle, Plan, TargetState, check_at_rest

app = typer.Typer(
    cls=CommandGroup, help="List what a ledger holds, or copy it to another server.", no_args_is_help=True
)

NUMBERS = LedgerCounts.__struct_fields__

Shared = dict[tuple[Any, ...], Any]
"""Connections that all pipelines of a ledger share."""


@app.command("list")
def listed(
    url: Annotated[str, typer.Argument(metavar="URL", help="The ledger, as sqlite:///shop.db.")],
    json: JsonOption = False,
) -> None:
    """List the pipelines that a ledger knows.

    \b
    Example:
      keywise ledger list sqlite:///shop.db
    """
    _check_place(url, "URL")
    found = asyncio.run(_listed(url))
    if json:
        print_json({"ledger": redacted(url), "pipelines": found})
        return
    if not found:
        print(plain(f"{redacted(url)} holds nothing of any pipeline"))
        return
    rows = [(one | {"paused": "yes" if one["paused"] else "no"}).values() for one in found]
    print_table(("pipeline", *NUMBERS, "paused"), rows, numbers=NUMBERS)


async def _listed(url: str) -> list[dict[str, Any]]:
    """Return the name of each pipeline, its numbers, and whether it is paused."""
    found, shared = [], Shared()
    for name in await _scopes(url, shared):
        async with _opened(url, name, LedgerPolicy(), shared) as ledger:
            counts, controls = await ledger.admin.counts(), await ledger.control_store.controls()
            found.append({"pipeline": name, **msgspec.structs.asdict(counts), "paused": controls.is_paused})
    return found


@dataclass(frozen=True, kw_only=True)
class CopyOptions:
    """The options of a copy."""

    source: Annotated[str, typer.Argument(metavar="FROM", help="The ledger in use now.")]
    target: Annotated[str, typer.Argument(metavar="TO", help="The ledger to use next.")]
    pipeline: Annotated[
        list[str] | None,
        typer.Option("--pipeline", metavar="NAME", help="This pipeline, and more if given again; all without it."),
    ] = None
    replace: Annotated[bool, typer.Option("--replace", help="Replace what TO holds of a pipeline.")] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check both sides, and copy nothing.")] = False
    yes: YesOption = False
    app: AppOption = None
    why: WhyOption = ""
    who: WhoOption = ""
    json: JsonOption = False


@app.command()
@grouped
def copy(options: CopyOptions) -> None:
    """Copy a ledger to another server or technology, and compare both.

    Copies the pipelines of the app, or all that FROM knows if no app is named. They have to be paused, and stay
    paused in TO. Keys, dead letters, history and pauses are copied; the queue and the sink are not.
    FROM does not change, except for a line in its history. After an interrupted copy, run the same command again.

    Exits with status 1 if something was not copied, or both sides differ.

    \b
    Example:
      keywise pause --all --wait --app shop:app
      keywise ledger copy sqlite:///shop.db postgresql://db/shop --app shop:app
    """
    source, target = options.source, options.target
    _check_place(source, "FROM", exists=True)
    _check_place(target, "TO")
    if _is_same(source, target):
        refuse(f"FROM and TO are the same ledger, {redacted(source)}; name another one to copy to")
    loaded = load(options.app) if options.app else None
    job = Copy(options, audit_note(options.who, options.why))
    try:
        reports = asyncio.run(job.run(loaded, options.pipeline or []))
    except KeyboardInterrupt:
        fail(
            f"stopped; unfinished pipelines stay paused in {redacted(target)}; run the same command to copy them again"
        )
    if options.json:
        place = {"from": redacted(source), "to": redacted(target), "dry_run": options.dry_run}
        print_json(place | {"pipelines": reports})
        return
    for report in reports:
        print(plain(str(report)))
        if report.outcome == "copied":
            resume = f"keywise resume --all --pipeline {shlex.quote(report.pipeline)}"
            print(plain(f"it stays paused; start its workers with the new ledger, then: {resume}"))


class CopyReport(msgspec.Struct):
    """The result of copying one pipeline."""

    pipeline: str
    outcome: str
    """`copied`, `same`, or `to copy` in a dry run."""
    keys: int
    letters: int
    lines: int | None = None
    digests: dict[str, str] = {}
    clock_shift_s: float = 0.0
    """By how many seconds all times were shifted, because the clocks of both ledgers differ."""

    def __str__(self) -> str:
        figures = f"{count(self.keys, 'key')}, {count(self.letters, 'dead letter')}"
        if self.lines is not None:
            figures += f", {count(self.lines, 'line')} of history; both sides agree, digest {self.digests['keys'][:16]}"
        if self.clock_shift_s:
            ahead = "ahead" if self.clock_shift_s > 0 else "behind"
            figures += f"; the clock of TO is {duration(abs(self.clock_shift_s))} {ahead}, and times were shifted"
        return f"{_OUTCOME_TEXTS[self.outcome]} {self.pipeline}: {figures}"


_OUTCOME_TEXTS = {"copied": "copied", "same": "nothing to do, both sides agree on", "to copy": "would copy"}


class Copy:
    """One run of `keywise ledger copy`; it copies one pipeline after another."""

    def __init__(self, options: CopyOptions, audit_note: AuditNote) -> None:
        self._options = options
        self._audit_note = audit_note
        self._shared = Shared()
        self._bar = progress(
            TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
        )

    async def run(self, loaded: App | None, names: Sequence[str]) -> list[CopyReport]:
        """Check all pipelines, then copy them; if one cannot be copied, none is."""
        chosen = _chosen(
            await _scopes(self._options.source, self._shared), loaded, names, redacted(self._options.source)
        )
        async with AsyncExitStack() as stack:
            copies = [
                await stack.enter_async_context(self._ledger_copy(name, _policy(loaded, name))) for name in chosen
            ]
            stack.callback(self._bar.stop)
            plans = [await copy.plan() for copy in copies]
            for copy, plan in zip(copies, plans, strict=True):
                await self._check(copy, plan)
            return [await self._copied(copy, plan) for copy, plan in zip(copies, plans, strict=True)]

    @asynccontextmanager
    async def _ledger_copy(self, name: str, policy: LedgerPolicy) -> AsyncIterator[LedgerCopy]:
        is_new = self._options.dry_run and (file := _file_of(self._options.target)) is not None and not file.exists()
        # Opening a SQLite file would create it, and a dry run must not leave a file behind.
        there = "memory://" if is_new else self._options.target
        async with AsyncExitStack() as stack:
            source = await stack.enter_async_context(_opened(self._options.source, name, policy, self._shared))
            original = LedgerHandle(redacted(self._options.source), source)
            # Check the source first, because opening the target creates files or tables.
            await check_at_rest(name, original)
            target = await stack.enter_async_context(_opened(there, name, policy, self._shared))
            task = self._bar.add_task(plain(name), total=(await source.admin.counts()).keys or None)

            def show_progress(what: str, done: int) -> None:
                if not self._bar.disable:
                    self._bar.start()
                    self._bar.update(task, description=plain(f"{name}: {what}"), completed=done)

            yield LedgerCopy(name, original, LedgerHandle(redacted(self._options.target), target), show_progress)

    async def _check(self, copy: LedgerCopy, plan: Plan) -> None:
        if plan.found is not TargetState.OTHER:
            return
        target, name = redacted(self._options.target), plan.pipeline
        if not self._options.replace:
            raise AdminError(
                f"{target} already holds something else of pipeline {name!r}: {plan.difference}; nothing was copied. "
                "Copy to an empty ledger, or replace it with --replace"
            )
        await copy.check_replaceable()
        if not self._options.dry_run:
            self._bar.stop()
            confirm(f"Replace what {target} holds of {name} ({plan.difference})?", yes=self._options.yes)

    async def _copied(self, copy: LedgerCopy, plan: Plan) -> CopyReport:
        if plan.found is TargetState.SAME or self._options.dry_run:
            outcome = "same" if plan.found is TargetState.SAME else "to copy"
            return CopyReport(plan.pipeline, outcome, plan.counts.keys, plan.counts.dead, clock_shift_s=plan.shift_s)
        done: Checksums = await copy.run(plan, self._audit_note)
        digests = {"keys": str(done.keys), "letters": str(done.letters), "lines": str(done.lines)}
        counts = (done.keys.count, done.letters.count, done.lines.count)
        return CopyReport(plan.pipeline, "copied", *counts, digests, plan.shift_s)


def _chosen(known: Sequence[str], loaded: App | None, names: Sequence[str], place: str) -> list[str]:
    """Return the pipelines to copy: those that are named, else those of the app, else all."""
    known_text = f"it has: {', '.join(known)}" if known else "it holds nothing of any pipeline"
    for name in names:
        if name not in known:
            refuse(f"{place} knows no pipeline {name!r}; {suggestion(name, known, known_text)}")
    requested = list(dict.fromkeys(names)) or list(loaded.pipelines if loaded else known)
    found = [name for name in requested if name in known]
    if not found:
        fail(f"there is nothing to copy: {place} knows no pipeline{' of this app' if loaded else ''}; {known_text}")
    if missing := [name for name in requested if name not in known]:
        print_note(f"{place} holds nothing of {', '.join(missing)}, so there is nothing to copy of it")
    if others := [name for name in known if name not in found and not names]:
        print_note(f"{place} also knows {', '.join(others)}, which this app does not have; copy it with --pipeline")
    return found


def _policy(loaded: App | None, name: str) -> LedgerPolicy:
    """Return the ledger policy of a pipeline of the app; the default one if the app does not have it."""
    if loaded is None or name not in loaded.pipelines:
        return LedgerPolicy()
    definition = loaded.pipelines[name]
    settings = definition.settings
    return LedgerPolicy(redelivery_s=settings.redelivery_s, retention_s=settings.retention_s, rate=definition.rate)


async def _scopes(url: str, shared: Shared) -> list[str]:
    async with _opened(url, "", LedgerPolicy(), shared) as ledger:
        return await ledger.transfer.scopes()


@asynccontextmanager
async def _opened(url: str, name: str, policy: LedgerPolicy, shared: Shared) -> AsyncIterator[TransferableLedger]:
    ledger = adapters.connect_ledger(Address(url, name, shared), policy)
    if not isinstance(ledger, TransferableLedger):
        raise AdminError(f"the ledger {redacted(url)} cannot be copied: its adapter has no `transfer`")
    async with ledger:
        yield ledger


def _check_place(url: str, name: str, *, exists: bool = False) -> None:
    """Exit with status 2 if the URL cannot name a usable ledger; opens nothing."""
    address = Address(url, "", {})
    if address.scheme == "memory":
        refuse(f"{name} is {redacted(url)}, which lives and dies with one process; name a ledger that others can see")
    file = _file_of(url)
    if file is not None and not file.is_file() and (exists or name == "URL"):
        refuse(f"there is no file {str(file)!r}, seen from {os.getcwd()}; {name} has to be an existing ledger")


def _file_of(url: str) -> Path | None:
    address = Address(url, "", {})
    return Path(address.file()) if address.scheme == "sqlite" else None


def _is_same(source: str, target: str) -> bool:
    mine, theirs = _file_of(source), _file_of(target)
    if mine is not None and theirs is not None and mine.exists() and theirs.exists():
        return mine.samefile(theirs)
    return source == target
