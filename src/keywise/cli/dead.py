"""`keywise dead`: look at dead letters, send them again, or forget them."""

import asyncio
import base64
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AsyncExitStack
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from rich.text import Text

from keywise.app import App
from keywise.change import Want
from keywise.cli.loading import AppOption, JsonOption, PipelineOption, chosen, load, warn_of_memory
from keywise.cli.speech import (
    agreed,
    cell,
    complain,
    count,
    display,
    fail,
    iso,
    moment,
    plain,
    plain_lines,
    refuse,
    stamp,
    table,
    tell_json,
)
from keywise.errors import LetterError, MalformedError
from keywise.pipeline import Pipeline
from keywise.protocols import Letter
from keywise.rules import Answer, Policy, decide

T = TypeVar("T")

PAGE = 100
"""Letters are looked through in stretches that double."""

app = typer.Typer(help="Look at dead letters, send them again, or forget them.", no_args_is_help=True)

Numbers = Annotated[list[int], typer.Argument(metavar="NUMBER", help="As shown by keywise dead list.")]


class Found(msgspec.Struct):
    """A dead letter, and where it lies."""

    pipeline: Pipeline
    number: int
    at: float
    """By the wall clock."""
    letter: Letter


@app.command("list")
def list_letters(
    app: AppOption = None,
    pipeline: PipelineOption = None,
    limit: Annotated[int, typer.Option(min=1, help="The newest so many.")] = 20,
    json: JsonOption = False,
) -> None:
    """List dead letters, the newest first.

    \b
    Example:
      keywise dead list --app shop:app --limit 5
    """

    async def look(pipelines: list[Pipeline]) -> tuple[list[Found], int]:
        found = [one for opened in pipelines for one in await _newest(opened, limit)]
        found = sorted(found, key=lambda one: one.at, reverse=True)[:limit]
        return found, sum([(await opened.operator.census()).dead for opened in pipelines])

    found, total = _with_pipelines(app, pipeline, look)
    if json:
        tell_json({"dead": total, "letters": [_summary(one) for one in found]})
        return
    if not found:
        print("no dead letters")
        return
    made = table(
        "number", "when", "pipeline", "key", "version", "cause", numbers=("number", "version"), fold=("cause",)
    )
    for one in found:
        letter = one.letter
        key, version = repr(letter.key) if letter.key else "-", "-" if letter.version is None else str(letter.version)
        made.add_row(str(one.number), stamp(one.at), cell(one.pipeline.name), cell(key), version, cell(letter.cause))
    display(made)
    if total > len(found):
        print(f"{len(found):,} of {total:,}; see more with --limit")


@app.command("show")
def show(
    number: Annotated[int, typer.Argument(metavar="NUMBER", help="As shown by keywise dead list.")],
    app: AppOption = None,
    pipeline: PipelineOption = None,
    json: JsonOption = False,
) -> None:
    """Show one dead letter: its cause, headers and body.

    \b
    Example:
      keywise dead show 12 --app shop:app
    """

    async def look(pipelines: list[Pipeline]) -> Found:
        [found] = await _letters(pipelines, [number])
        return found

    found = _with_pipelines(app, pipeline, look)
    if json:
        tell_json(_whole(found))
        return
    letter, now = found.letter, time.time()
    facts = table("", "", fold=("",))
    facts.show_header = False
    facts.add_row(Text("letter", "bold"), f"{found.number} of {plain(found.pipeline.name)}")
    facts.add_row(Text("buried", "bold"), moment(found.at, now))
    facts.add_row(Text("cause", "bold"), cell(letter.cause))
    facts.add_row(Text("key", "bold"), cell(repr(letter.key) if letter.key else "not readable"))
    facts.add_row(Text("version", "bold"), "-" if letter.version is None else str(letter.version))
    facts.add_row(Text("source", "bold"), cell(letter.source))
    for name, value in sorted((letter.headers or {}).items()):
        facts.add_row(Text("header", "bold"), cell(f"{name}: {value}"))
    display(facts)
    print()
    print(plain_lines(_text(letter.body)))


@app.command("replay")
def replay(
    numbers: Annotated[list[int] | None, typer.Argument(metavar="NUMBER", help="Of the letters to send.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All letters, the oldest first.")] = False,
    app: AppOption = None,
    pipeline: PipelineOption = None,
    json: JsonOption = False,
) -> None:
    """Send dead letters again, if they are still news.

    A letter at or below the mark of its key is refused, as is one that still cannot be read;
    refused letters stay, and the exit status is 1.

    \b
    Example:
      keywise dead replay 12 13 --app shop:app
      keywise dead replay --all --pipeline pages --app shop:app
    """
    if bool(numbers) == every:
        refuse("name the letters to replay, as in keywise dead replay 12, or say --all")

    async def act(pipelines: list[Pipeline]) -> tuple[list[Found], list[tuple[Found, str]]]:
        letters = await (_all(pipelines) if every else _letters(pipelines, numbers or []))
        replayed, refused = [], []
        for found in sorted(letters, key=lambda one: one.number):
            try:
                await send_again(found)
            except LetterError as error:
                refused.append((found, str(error)))
            else:
                replayed.append(found)
        return replayed, refused

    replayed, refused = _with_pipelines(app, pipeline, act)
    if json:
        told = [{"number": found.number, "cause": cause} for found, cause in refused]
        tell_json({"replayed": [found.number for found in replayed], "refused": told})
    else:
        print(f"replayed {count(len(replayed), 'letter')}")
        for _, cause in refused:
            complain(cause)
    if refused:
        raise typer.Exit(1)


@app.command("drop")
def drop(
    numbers: Numbers,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    app: AppOption = None,
    pipeline: PipelineOption = None,
    json: JsonOption = False,
) -> None:
    """Forget dead letters for ever.

    \b
    Example:
      keywise dead drop 12 13 --app shop:app
    """

    async def act(pipelines: list[Pipeline]) -> int:
        found = await _letters(pipelines, numbers)
        if not yes and not agreed(f"Forget {count(len(found), 'letter')} for ever?"):
            fail("nothing was dropped; answer y, or pass --yes")
        return sum([await one.pipeline.operator.drop([one.number]) for one in found])

    dropped = _with_pipelines(app, pipeline, act)
    if json:
        tell_json({"dropped": dropped})
    else:
        print(f"dropped {count(dropped, 'letter')}")


async def send_again(found: Found) -> None:
    """Send a letter's body to the pipeline's first source, then forget the letter: a crash between only duplicates."""
    pipeline, letter = found.pipeline, found.letter
    try:
        change = pipeline.envelope.read_one(letter.body)
    except MalformedError as error:
        raise LetterError(
            f"letter {found.number} cannot be read: {error}; it stays, drop it if it is of no use"
        ) from error
    entry, now = await pipeline.operator.inspect(change.key), await pipeline.operator.now()
    refusal = decide(entry, Want(change.key, change.order), now, Policy())
    if refusal is not None and refusal.mark is not None:
        raise LetterError(_told(found.number, change.key, change.version, refusal.answer, refusal.mark[1]))
    [url, source], *_ = pipeline.sources
    if url.startswith("memory:"):
        raise LetterError(
            f"letter {found.number} would end with this command: {pipeline.name} reads from {url}; it stays"
        )
    await source.send([letter.body])
    await pipeline.operator.drop([found.number])


def _told(number: int, key: str, version: int | None, answer: Answer, mark: int) -> str:
    what = f"letter {number} has version {version} of {key!r}"
    if answer is Answer.MIXED:
        return f"letter {number} of {key!r} cannot be ordered: some of its changes have a version and some have none"
    if version is None:
        return f"letter {number} is refused: {key!r} was applied already, and without a version that is once; it stays"
    applied = "is applied already" if answer is Answer.DUPLICATE else f"is stale: its mark is version {mark}"
    return f"{what}, which {applied}; it stays, drop it with keywise dead drop {number}"


def _with_pipelines(target: str | None, name: str | None, act: Callable[[list[Pipeline]], Coroutine[Any, Any, T]]) -> T:
    """Act on the opened pipelines that are meant."""
    loaded = load(target)
    names = chosen(loaded, [name])
    warn_of_memory(loaded)
    return asyncio.run(_opened(loaded, names, act))


async def _opened(app: App, names: list[str], act: Callable[[list[Pipeline]], Coroutine[Any, Any, T]]) -> T:
    async with AsyncExitStack() as stack:
        return await act([await stack.enter_async_context(app.open(name, work=False)) for name in names])


async def _newest(pipeline: Pipeline, limit: int) -> list[Found]:
    ahead_s = time.time() - await pipeline.operator.now()
    letters = await pipeline.operator.letters(limit)
    return [Found(pipeline, number, buried_at + ahead_s, letter) for number, buried_at, letter in letters]


async def _all(pipelines: Iterable[Pipeline]) -> list[Found]:
    counted = [(opened, (await opened.operator.census()).dead) for opened in pipelines]
    return [one for opened, dead in counted if dead for one in await _newest(opened, dead)]


async def _letters(pipelines: list[Pipeline], numbers: list[int]) -> list[Found]:
    """The letters with these numbers; one that does not exist, or exists twice, ends the command."""
    found = [one for opened in pipelines for one in await _search(opened, set(numbers))]
    known = [one.number for one in found]
    missing = sorted(set(numbers) - set(known))
    if missing:
        fail(f"no dead letter has the number {' or '.join(map(str, missing))}; see keywise dead list")
    if len(known) > len(set(known)):
        refuse("more than one pipeline has a letter of that number; say which with --pipeline")
    return found


async def _search(pipeline: Pipeline, numbers: set[int]) -> list[Found]:
    limit = PAGE
    while True:
        letters = await _newest(pipeline, limit)
        found = [one for one in letters if one.number in numbers]
        if len(letters) < limit or len(found) == len(numbers):
            return found
        limit *= 2


def _summary(found: Found) -> dict[str, Any]:
    letter = found.letter
    return {
        "number": found.number,
        "at": iso(found.at),
        "pipeline": found.pipeline.name,
        "key": letter.key or None,
        "version": letter.version,
        "cause": letter.cause,
    }


def _whole(found: Found) -> dict[str, Any]:
    letter = found.letter
    told = _summary(found) | {
        "source": letter.source,
        "sent_at": iso(letter.sent_at),
        "headers": dict(letter.headers or {}),
        "body": _text(letter.body),
    }
    if not _is_utf8(letter.body):
        told["body_base64"] = base64.b64encode(letter.body).decode()
    return told


def _text(body: bytes) -> str:
    return body.decode("utf-8", "backslashreplace")


def _is_utf8(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True
