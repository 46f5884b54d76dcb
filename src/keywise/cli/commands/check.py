"""`keywise check`: tests a source, ledger, sink, origin or backend of serial functions against its contract."""

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keywise.cli.app_loader import JsonOption
from keywise.cli.group import CommandGroup
from keywise.cli.output import fail, plain, print_line, print_result, progress

if TYPE_CHECKING:
    from keywise.testing.conformance import Checked, Conformance, Playground

app = typer.Typer(
    cls=CommandGroup, help="Check a source, ledger, sink, origin or serial backend.", no_args_is_help=True
)

Url = Annotated[str, typer.Argument(metavar="URL", help="As in an app, without the name of a queue or table.")]


@app.command()
def source(url: Url, json: JsonOption = False) -> None:
    """Check a queue: messages come until they are acked, and to one consumer at a time.

    It creates its own queues, and removes them afterwards.

    Exits with status 1 if a promise is broken.

    \b
    Example:
      keywise check source sqlite:///shop.db
    """
    _check("sources", url, json)


@app.command()
def ledger(url: Url, json: JsonOption = False) -> None:
    """Check a ledger: one holder per key, newest wins, and the same answers as the memory ledger.

    It creates its own scopes, and removes them afterwards.

    Exits with status 1 if a promise is broken.

    \b
    Example:
      keywise check ledger sqlite:///shop.db
    """
    _check("ledgers", url, json)


@app.command()
def sink(url: Url, json: JsonOption = False) -> None:
    """Check a store, by its grade: changes arrive whole, deletions delete, and older ones are refused.

    It creates its own tables, and removes them afterwards.

    Exits with status 1 if a promise is broken.

    \b
    Example:
      keywise check sink sqlite:///shop.db
    """
    _check("sinks", url, json)


@app.command()
def origin(url: Url, json: JsonOption = False) -> None:
    """Check a source of truth: shards cover each row once, cursors resume, and rows are read as they are now.

    It creates its own tables, and removes them afterwards.

    Exits with status 1 if a promise is broken.

    \b
    Example:
      keywise check origin sqlite:///shop.db
    """
    _check("origins", url, json)


@app.command()
def turns(url: Url, json: JsonOption = False) -> None:
    """Check a backend of serial functions: one call per key at a time, in order, and each id once.

    It creates its own serial functions, and removes them afterwards.

    Exits with status 1 if a promise is broken.

    \b
    Example:
      keywise check turns sqlite:///shop.db
    """
    _check("turns", url, json)


def _check(role: str, url: str, json: bool) -> None:
    from keywise.testing.conformance import Playground, Verdict

    playground = Playground(role, url)
    if not json:
        print(plain(f"writes to {playground}"))
    report = asyncio.run(_checked(playground, role, json))
    counts = {verdict.value: len(report.of(verdict)) for verdict in Verdict}
    fields = {"role": report.role, "wrote_to": playground.prefix, **counts, "promises": report.checked}
    print_result(fields, report.summary, json=json)
    if broken := report.of(Verdict.BROKEN):
        if json:
            raise typer.Exit(1)
        fail(f"{len(broken)} of {len(report.checked)} promises are broken; the contracts are in keywise/core")


async def _checked(playground: "Playground", role: str, json: bool) -> "Conformance":
    from keywise.testing import conformance
    from keywise.testing.conformance.report import NotConformingError, hold

    checks: dict[str, tuple[str, Any, Any]] = {
        "sources": ("source", playground.source, conformance.source_promises),
        "ledgers": ("ledger", playground.ledger, conformance.promises_of_ledger),
        "sinks": ("sink", playground.sink, conformance.sink_promises),
        "origins": ("origin", playground.origin, conformance.origin_promises),
        "turns": ("turns", playground.turns, conformance.promises_of_turns),
    }
    called, bench, of_role = checks[role]
    with progress() as bar:
        task = bar.add_task("promises", total=None)

        def show_checked(checked: "Checked") -> None:
            bar.advance(task)
            if not json:
                print_line(checked)

        try:
            promises = await of_role(bench)
            bar.update(task, total=len(promises))
            return await hold(called, promises, bench, show_checked)
        except NotConformingError as error:
            return error.report
        finally:
            await playground.clean()
