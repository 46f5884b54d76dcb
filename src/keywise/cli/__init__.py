"""The command line: one file per command in `commands/`, and what they share beside it."""

import sys
from typing import Annotated

import typer

from keywise import __version__
from keywise.cli.commands.check import app as check
from keywise.cli.commands.dead import app as dead
from keywise.cli.commands.force import force, remove
from keywise.cli.commands.ledger import app as ledger
from keywise.cli.commands.objects import app as objects
from keywise.cli.commands.pause import pause, resume
from keywise.cli.commands.prune import prune
from keywise.cli.commands.reconcile import reconcile
from keywise.cli.commands.reindex import app as reindex
from keywise.cli.commands.reindex_targets import drop, rollback, run_fully, swap, verify
from keywise.cli.commands.repair import repair
from keywise.cli.commands.reset import reset
from keywise.cli.commands.run import run
from keywise.cli.commands.send import send
from keywise.cli.commands.serial import app as serial
from keywise.cli.commands.simulate import simulate
from keywise.cli.commands.status import status
from keywise.cli.commands.why import why
from keywise.cli.group import CommandGroup
from keywise.cli.output import print_error
from keywise.core.errors import KeywiseError

app = typer.Typer(
    name="keywise",
    cls=CommandGroup,
    help="Queues deliver twice, late and out of order; keywise makes your store end up right anyway.",
    epilog="Every command has --help with an example.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (run, send, status, why, pause, resume, reset, force, remove, repair, reconcile, prune, simulate):
    app.command()(command)
for command in (verify, swap, rollback, drop):
    reindex.command()(command)
reindex.command("run")(run_fully)
GROUPS = {"dead": dead, "objects": objects, "reindex": reindex, "ledger": ledger, "serial": serial, "check": check}
for name, group in GROUPS.items():
    app.add_typer(group, name=name)


def main() -> None:
    """Run the command in `sys.argv`. A `KeywiseError` becomes one line on stderr and exit status 1."""
    for stream in (sys.stdout, sys.stderr):
        # A key may contain characters that the encoding of the terminal lacks.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        app()
    except KeywiseError as error:
        print_error(error)
        sys.exit(1)


def _print_version(is_set: bool) -> None:
    if is_set:
        print(f"keywise {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of keywise itself."""
