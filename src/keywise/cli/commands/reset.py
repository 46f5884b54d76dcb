"""`keywise reset`: begins a new era for one key or a whole pipeline, after upstream has restarted its numbering."""

from typing import Annotated

import typer

from keywise.cli.admin_options import WAIT_DEFAULT, AdminOptions, WaitOption, YesOption, confirm, perform
from keywise.cli.options import grouped, require_valid_key
from keywise.cli.output import count, print_result, refuse
from keywise.core.source import backlog_of
from keywise.operate.admin import PipelineAdmin


@grouped
def reset(
    key: Annotated[str | None, typer.Argument(metavar="KEY", help="One key.")] = None,
    *,
    era: Annotated[bool, typer.Option("--era", help="All keys; the whole pipeline has to be paused.")] = False,
    wait: WaitOption = WAIT_DEFAULT,
    yes: YesOption = False,
    options: AdminOptions,
) -> None:
    """Begin a new era, in which the next change wins.

    The mark of a key stays, and its next change counts as newer, at any version.
    With --era this holds for all keys; the whole pipeline has to be paused. Messages that are still queued count as
    the new numbering, so first stop the producer and let the queue drain.
    A sink that compares versions itself has no eras, and needs a fresh target instead.

    \b
    Example:
      keywise reset page-17 --why 'restored from a backup' --app shop:app
      keywise reset --era --wait 60s --app shop:app
    """
    if (key is not None) == era:
        refuse("name a key, as in keywise reset page-17, or say --era for all of them")

    async def act(admin: PipelineAdmin) -> int:
        if key is not None:
            return await admin.reset(require_valid_key(key))
        opened = admin.pipeline
        await admin.check_pause()
        known = count((await opened.admin.counts()).keys, "known key")
        backlogs = [await backlog_of(source) for _, source in opened.sources]
        queued = count(sum(one.seen for one in backlogs), "queued message")
        queued += "" if all(one.is_all for one in backlogs) else " or more"
        confirm(f"Begin a new era of {opened.name}, with {known}? The new numbering begins with {queued}.", yes=yes)
        return await admin.raise_era()

    name, number = perform(options, act, wait)
    text = f"{repr(key) if key is not None else 'every key'} of {name} is in era {number}: the next change wins"
    print_result({"pipeline": name, "key": key, "era": number}, text, json=options.json)
