"""A group of commands whose help says of each what it does, in a whole sentence."""

from typing import Any

from typer.core import TyperGroup

SENTENCE_MAX = 500
"""No first sentence of a command is longer, so none is cut."""


class CommandGroup(TyperGroup):
    """Wraps the sentences to the width of the terminal, where the class of the library cuts them."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.get_short_help_str(SENTENCE_MAX)) for name, one in commands if one])
