"""`keywise dead`: lists, shows, replays and drops dead letters."""

import asyncio
import base64
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Annotated, Any, TypeVar

import typer
from rich.text import Text

from keywise.app import App
from keywise.cli.admin_options import AdminOptions, WhoOption, WhyOption, YesOption, audit_note, confirm
from keywise.cli.app_loader import AppOption, JsonOption, PipelineOption, choose_pipelines, load, warn_if_in_memory
from keywise.cli.dead_letter_options import (
    CauseOption,
    Filter,
    FoundLetter,
    SinceOption,
    UntilOption,
    by_number,
    filter_of,
    meant,
    newest,
    summary,
)
from keywise.cli.output import (
    cell,
    count,
    fail,
    iso,
    moment,
    plain,
    plain_lines,
    print_error,
    print_json,
    print_table,
    refuse,
    stamp,
    table,
)
from keywise.core.errors import LetterError
from keywise.core.history import HistoryRecord
from keywise.flow.pipeline import Pipeline
from keywise.operate.admin import AuditNote, record
from keywise.operate.replay import replay as send_again

T = TypeVar("T")

app = typer.Typer(help="List, show, replay or drop dead letters.", no_args_is_help=True)

Numbers = Annotated[list[int] | None, typer.Argument(metavar="NUMBER", help="As shown by keywise dead list.")]
AllOption = Annotated[bool, typer.Option("--all", help="All letters, the oldest first.")]


@app.command("list")
def list_letters(  # noqa: PLR0913 - one parameter per option
    *,
    app: AppOption = None,
    pipeline: PipelineOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    cause: CauseOption = "",
    limit: Annotated[int, typer.Option(min=1, help="How many to list, the newest first.")] = 20,
    json: JsonOption = False,
) -> None:
    """List dead letters, the newest first.

    \b
    Example:
      keywise dead list --app shop:app --limit 5
      keywise dead list --since 2h --cause Timeout --app shop:app
    """
    selection = filter_of(since, until, cause)

    async def look(pipelines: list[Pipeline]) -> tuple[list[FoundLetter], int]:
        found = [one for opened in pipelines for one in await newest(opened, limit, selection)]
        found = sorted(found, key=lambda one: one.at, reverse=True)[:limit]
        return found, sum([(await opened.admin.counts()).dead for opened in pipelines])

    found, total = _with_pipelines(app, pipeline, look)
    if json:
        print_json({"dead": total, "letters": [summary(one) for one in found]})
        return
    if not found:
        print("no dead letters" if not total or not selection else f"none of {count(total, 'dead letter')} matches")
        return
    made = table(
        "number", "when", "pipeline", "key", "version", "cause", numbers=("number", "version"), fold=("cause",)
    )
    for one in found:
        letter = one.letter
        key, version = repr(letter.key) if letter.key else "-", "-" if letter.version is None else str(letter.version)
        made.add_row(str(one.number), stamp(one.at), cell(one.pipeline.name), cell(key), version, cell(letter.cause))
    print_table(made)
    if total > len(found):
        more = "; see more with --limit" if len(found) == limit else ""
        print(f"{len(found):,} of {total:,}{more}")


@app.command("show")
def show(  # noqa: PLR0913 - one parameter per option
    number: Annotated[
        int | None, typer.Argument(metavar="NUMBER", help="As shown by keywise dead list; the newest without it.")
    ] = None,
    *,
    app: AppOption = None,
    pipeline: PipelineOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    cause: CauseOption = "",
    json: JsonOption = False,
) -> None:
    """Show one dead letter: its cause, headers and body.

    Without a number, it is the newest one that matches --since, --until and --cause.

    \b
    Example:
      keywise dead show 12 --app shop:app
      keywise dead show --cause Timeout --app shop:app
    """
    selection = filter_of(since, until, cause)
    if number is not None and selection:
        refuse("a number names one letter; leave out --since, --until and --cause")

    async def look(pipelines: list[Pipeline]) -> FoundLetter:
        if number is not None:
            [found] = await by_number(pipelines, [number])
            return found
        letters = [one for opened in pipelines for one in await newest(opened, 1, selection)]
        if not letters:
            fail("no dead letter matches; see keywise dead list")
        return max(letters, key=lambda one: one.at)

    found = _with_pipelines(app, pipeline, look)
    if json:
        print_json(_whole(found))
    else:
        _show(found)


def _show(found: FoundLetter) -> None:
    letter, now = found.letter, time.time()
    facts = table("", "", fold=("",))
    facts.show_header = False
    facts.add_row(Text("letter", "bold"), f"{found.number} of {plain(found.pipeline.name)}")
    facts.add_row(Text("since", "bold"), moment(found.at, now))
    facts.add_row(Text("cause", "bold"), cell(letter.cause))
    facts.add_row(Text("key", "bold"), cell(repr(letter.key) if letter.key else "not readable"))
    facts.add_row(Text("version", "bold"), "-" if letter.version is None else str(letter.version))
    facts.add_row(Text("source", "bold"), cell(letter.source))
    for name, value in sorted((letter.headers or {}).items()):
        facts.add_row(Text("header", "bold"), cell(f"{name}: {value}"))
    print_table(facts)
    print()
    print(plain_lines(_text(letter.body)))


@app.command("replay")
def replay(  # noqa: PLR0913 - one parameter per option
    numbers: Numbers = None,
    *,
    every: AllOption = False,
    since: SinceOption = None,
    until: UntilOption = None,
    cause: CauseOption = "",
    older: Annotated[bool, typer.Option("--older", help="Send letters of forgotten keys too, of any age.")] = False,
    yes: YesOption = False,
    app: AppOption = None,
    pipeline: PipelineOption = None,
    why: WhyOption = "",
    who: WhoOption = "",
    json: JsonOption = False,
) -> None:
    """Send dead letters again, unless something newer was applied.

    A letter is refused if its version is at or below the mark of its key, if it still cannot be read, or if it
    was sent before the retention and its key is forgotten. Refused letters stay, and the exit status is 1.
    For more than one letter, the command asks first.

    \b
    Example:
      keywise dead replay 12 13 --app shop:app
      keywise dead replay --all --pipeline pages --app shop:app
      keywise dead replay --since 2h --cause Timeout --yes --app shop:app
    """
    selection = _checked("replay", numbers, every, filter_of(since, until, cause))
    by = audit_note(AdminOptions(app, pipeline, why, who))

    async def act(pipelines: list[Pipeline]) -> tuple[list[FoundLetter], list[tuple[FoundLetter, str]]]:
        letters = await meant(pipelines, numbers or [], selection)
        if len(letters) > 1:
            confirm(f"Send {count(len(letters), 'letter')} again?", yes=yes)
        replayed, refused = [], []
        for found in letters:
            try:
                await send_again(found.pipeline, found.number, found.letter, older=older)
            except LetterError as error:
                refused.append((found, str(error)))
            else:
                replayed.append(found)
                await _record(found, "replayed", by)
        return replayed, refused

    replayed, refused = _with_pipelines(app, pipeline, act)
    if json:
        stay = [{"number": found.number, "cause": message} for found, message in refused]
        print_json({"replayed": [found.number for found in replayed], "refused": stay})
    else:
        print(f"replayed {count(len(replayed), 'letter')}")
        for _, message in refused:
            print_error(message)
    if refused:
        raise typer.Exit(1)


@app.command("drop")
def drop(  # noqa: PLR0913 - one parameter per option
    numbers: Numbers = None,
    *,
    every: AllOption = False,
    since: SinceOption = None,
    until: UntilOption = None,
    cause: CauseOption = "",
    yes: YesOption = False,
    app: AppOption = None,
    pipeline: PipelineOption = None,
    why: WhyOption = "",
    who: WhoOption = "",
    json: JsonOption = False,
) -> None:
    """Delete dead letters for ever.

    \b
    Example:
      keywise dead drop 12 13 --app shop:app
      keywise dead drop --until 30d --yes --app shop:app
    """
    selection = _checked("drop", numbers, every, filter_of(since, until, cause))
    by = audit_note(AdminOptions(app, pipeline, why, who))

    async def act(pipelines: list[Pipeline]) -> int:
        letters, dropped = await meant(pipelines, numbers or [], selection), 0
        if letters:
            confirm(f"Delete {count(len(letters), 'letter')} for ever?", yes=yes)
        for found in letters:
            if await found.pipeline.admin.delete_dead_letters([found.number]):
                dropped += 1
                await _record(found, "dropped", by)
        return dropped

    dropped = _with_pipelines(app, pipeline, act)
    if json:
        print_json({"dropped": dropped})
    else:
        print(f"dropped {count(dropped, 'letter')}")


def _checked(verb: str, numbers: list[int] | None, every: bool, selection: Filter) -> Filter:
    """Exit with status 2 unless the letters are given by number, or else by --all or a filter."""
    if bool(numbers) == (every or bool(selection)):
        refuse(
            f"name the letters to {verb}, as in keywise dead {verb} 12, or choose them with --all, "
            "or with --since, --until and --cause"
        )
    return selection


async def _record(found: FoundLetter, what: str, by: AuditNote) -> None:
    letter = found.letter
    await record(found.pipeline, by, HistoryRecord(0.0, what, letter.key, letter.version, f"letter {found.number}"))


def _with_pipelines(target: str | None, name: str | None, act: Callable[[list[Pipeline]], Coroutine[Any, Any, T]]) -> T:
    """Open the chosen pipelines and run the action on them."""
    loaded = load(target)
    names = choose_pipelines(loaded, [name])
    warn_if_in_memory(loaded)
    return asyncio.run(_opened(loaded, names, act))


async def _opened(app: App, names: list[str], act: Callable[[list[Pipeline]], Coroutine[Any, Any, T]]) -> T:
    async with AsyncExitStack() as stack:
        return await act([await stack.enter_async_context(app.open(name, work=False)) for name in names])


def _whole(found: FoundLetter) -> dict[str, Any]:
    letter = found.letter
    fields = summary(found) | {
        "source": letter.source,
        "sent_at": iso(letter.sent_at),
        "headers": dict(letter.headers or {}),
        "body": _text(letter.body),
    }
    if not _is_utf8(letter.body):
        fields["body_base64"] = base64.b64encode(letter.body).decode()
    return fields


def _text(body: bytes) -> str:
    return body.decode("utf-8", "backslashreplace")


def _is_utf8(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True
