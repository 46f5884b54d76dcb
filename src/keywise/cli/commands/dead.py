"""`keywise dead`: lists, shows, replays and drops dead letters."""

import base64
import time
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer

from keywise.cli.admin_options import AdminOptions, YesOption, audit_note, confirm
from keywise.cli.app_loader import AppOption, JsonOption, PipelineOption, with_pipelines
from keywise.cli.dead_letter_options import Filter, FoundLetter, by_number, look_beside, newest, selected, summary
from keywise.cli.group import CommandGroup
from keywise.cli.options import grouped
from keywise.cli.output import (
    count,
    fail,
    iso,
    moment,
    plain_lines,
    print_error,
    print_facts,
    print_json,
    print_result,
    print_table,
    print_traceback,
    refuse,
    stamp,
)
from keywise.core.errors import LetterError
from keywise.core.history import HistoryRecord
from keywise.flow.pipeline import OpenPipeline
from keywise.operate.admin import AuditNote, record
from keywise.operate.replay import Replayer

app = typer.Typer(cls=CommandGroup, help="List, show, replay or drop dead letters.", no_args_is_help=True)

Numbers = Annotated[list[int] | None, typer.Argument(metavar="NUMBER", help="As shown by keywise dead list.")]
BesideOption = Annotated[
    bool, typer.Option("--beside", help="Rows of the target that a reindex has built beside the live one.")
]
AllOption = Annotated[bool, typer.Option("--all", help="All letters, the oldest first.")]


@dataclass(frozen=True, kw_only=True)
class LettersOptions(AdminOptions):
    """The options of an operator's command on the letters of one pipeline or of all."""

    pipeline: PipelineOption = None


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """How letters are sent again."""

    older: Annotated[bool, typer.Option("--older", help="Send letters of forgotten keys too, of any age.")] = False
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Read objects again from their beginning, not where they stopped.")
    ] = False


@app.command("list")
@grouped
def list_letters(
    *,
    app: AppOption = None,
    pipeline: PipelineOption = None,
    beside: BesideOption = False,
    selection: Filter,
    limit: Annotated[int, typer.Option(min=1, help="How many to list, the newest first.")] = 20,
    json: JsonOption = False,
) -> None:
    """List dead letters, the newest first.

    \b
    Example:
      keywise dead list --app shop:app --limit 5
      keywise dead list --since 2h --cause Timeout --app shop:app
      keywise dead list --pipeline pages --beside --app shop:app
    """

    async def look(pipelines: list[OpenPipeline]) -> tuple[list[FoundLetter], int]:
        found = [one for opened in pipelines for one in await newest(opened, limit, selection)]
        found = sorted(found, key=lambda one: one.at, reverse=True)[:limit]
        return found, sum([(await opened.admin.counts()).dead for opened in pipelines])

    found, total = with_pipelines(app, pipeline, partial(look_beside, look) if beside else look)
    if json:
        print_json({"dead": total, "letters": [summary(one) for one in found]})
        return
    if not found:
        print("no dead letters" if not total or not selection else f"none of {count(total, 'dead letter')} matches")
        return
    columns = ("number", "when", "pipeline", "key", "version", "cause")
    fold, widths_min = ("when", "key", "cause"), {"when": len("2026-01-31")}
    print_table(columns, map(_row, found), numbers=("number", "version"), fold=fold, widths_min=widths_min)
    if total > len(found):
        more = "; see more with --limit" if len(found) == limit else ""
        print(f"{len(found):,} of {total:,}{more}")


def _row(found: FoundLetter) -> tuple[str, ...]:
    letter = found.letter
    key, version = repr(letter.key) if letter.key else "-", "-" if letter.version is None else str(letter.version)
    return str(found.number), stamp(found.at), found.pipeline.name, key, version, letter.cause


@app.command("show")
@grouped
def show(
    number: Annotated[
        int | None, typer.Argument(metavar="NUMBER", help="As shown by keywise dead list; the newest without it.")
    ] = None,
    *,
    app: AppOption = None,
    pipeline: PipelineOption = None,
    beside: BesideOption = False,
    selection: Filter,
    json: JsonOption = False,
) -> None:
    """Show one dead letter: its cause, headers, traceback and body.

    Without a number, it is the newest one that matches --since, --until and --cause.

    \b
    Example:
      keywise dead show 12 --app shop:app
      keywise dead show --cause Timeout --app shop:app
    """
    if number is not None and selection:
        refuse("a number names one letter; leave out --since, --until and --cause")

    async def look(pipelines: list[OpenPipeline]) -> FoundLetter:
        if number is not None:
            [found] = await by_number(pipelines, [number])
            return found
        letters = [one for opened in pipelines for one in await newest(opened, 1, selection)]
        if not letters:
            fail("no dead letter matches; see keywise dead list")
        return max(letters, key=lambda one: one.at)

    found = with_pipelines(app, pipeline, partial(look_beside, look) if beside else look)
    if json:
        print_json(_letter_json(found))
    else:
        _show(found)


def _show(found: FoundLetter) -> None:
    letter, now = found.letter, time.time()
    facts = [
        ("letter", f"{found.number} of {found.pipeline.name}"),
        ("since", moment(found.at, now)),
        ("cause", letter.cause),
        ("key", repr(letter.key) if letter.key else "not readable"),
        ("version", "-" if letter.version is None else str(letter.version)),
        ("source", letter.source or "-"),
        *([("routing key", letter.routing_key)] if letter.routing_key else []),
        *(("header", f"{name}: {value}") for name, value in sorted((letter.headers or {}).items())),
    ]
    print_facts(facts)
    print_traceback("traceback", letter.traceback)
    print()
    print(plain_lines(_text(letter.body)))


@app.command("replay")
@grouped
def replay(
    numbers: Numbers = None,
    *,
    every: AllOption = False,
    selection: Filter,
    how: ReplayOptions,
    yes: YesOption = False,
    options: LettersOptions,
) -> None:
    """Send dead letters again, unless something newer was applied.

    A letter is refused if its version is at or below the mark of its key, if it still cannot be read, or if it
    was sent before the retention and its key is forgotten. Refused letters stay, and the exit status is 1.
    For more than one letter, the command asks first.
    The letter of an object resumes behind the last part that was written; that of a record announces its object again,
    which is read as a whole.

    \b
    Example:
      keywise dead replay 12 13 --app shop:app
      keywise dead replay --all --pipeline pages --app shop:app
      keywise dead replay --since 2h --cause Timeout --yes --app shop:app
    """
    _check_choice("replay", numbers, every or bool(selection))
    by = audit_note(options.who, options.why)

    async def act(pipelines: list[OpenPipeline]) -> tuple[list[FoundLetter], list[tuple[FoundLetter, str]]]:
        letters = await selected(pipelines, numbers or [], selection)
        if len(letters) > 1:
            confirm(f"Send {count(len(letters), 'letter')} again?", yes=yes)
        if how.from_start and not all(found.pipeline.objects is not None for found in letters):
            refuse("--from-start is about letters of objects; choose those with --pipeline or by number")
        replayer, replayed, refused = Replayer(older=how.older, from_start=how.from_start), [], []
        for found in letters:
            try:
                await replayer.replay(found.pipeline, found.number, found.letter)
            except LetterError as error:
                refused.append((found, str(error)))
            else:
                replayed.append(found)
                await _record(found, "replayed", by)
        return replayed, refused

    replayed, refused = with_pipelines(options.app, options.pipeline, act)
    if options.json:
        stay = [{"number": found.number, "cause": message} for found, message in refused]
        print_json({"replayed": [found.number for found in replayed], "refused": stay})
    else:
        print(f"replayed {count(len(replayed), 'letter')}")
        for _, message in refused:
            print_error(message)
    if refused:
        raise typer.Exit(1)


@app.command("drop")
@grouped
def drop(
    numbers: Numbers = None,
    *,
    every: AllOption = False,
    selection: Filter,
    yes: YesOption = False,
    options: LettersOptions,
) -> None:
    """Delete dead letters for ever.

    \b
    Example:
      keywise dead drop 12 13 --app shop:app
      keywise dead drop --until 30d --yes --app shop:app
    """
    _check_choice("drop", numbers, every or bool(selection))
    by = audit_note(options.who, options.why)

    async def act(pipelines: list[OpenPipeline]) -> int:
        letters, dropped = await selected(pipelines, numbers or [], selection), 0
        if letters:
            confirm(f"Delete {count(len(letters), 'letter')} for ever?", yes=yes)
        for found in letters:
            if await found.pipeline.admin.delete_dead_letters([found.number]):
                dropped += 1
                await _record(found, "dropped", by)
        return dropped

    dropped = with_pipelines(options.app, options.pipeline, act)
    print_result({"dropped": dropped}, f"dropped {count(dropped, 'letter')}", json=options.json)


def _check_choice(verb: str, numbers: list[int] | None, is_filtered: bool) -> None:
    """Exit with status 2 unless the letters are given by number, or else by --all or a filter."""
    if bool(numbers) == is_filtered:
        refuse(
            f"name the letters to {verb}, as in keywise dead {verb} 12, or choose them with --all, "
            "or with --since, --until and --cause"
        )


async def _record(found: FoundLetter, what: str, by: AuditNote) -> None:
    letter = found.letter
    await record(found.pipeline, by, HistoryRecord(0.0, what, letter.key, letter.version, f"letter {found.number}"))


def _letter_json(found: FoundLetter) -> dict[str, Any]:
    letter, text = found.letter, _text(found.letter.body)
    fields = summary(found) | {
        "source": letter.source,
        "sent_at": iso(letter.sent_at),
        "headers": dict(letter.headers or {}),
        "routing_key": letter.routing_key,
        "traceback": letter.traceback,
        "body": text,
    }
    is_exact = text.encode() == letter.body
    return fields if is_exact else fields | {"body_base64": base64.b64encode(letter.body).decode()}


def _text(body: bytes) -> str:
    return body.decode("utf-8", "backslashreplace")
