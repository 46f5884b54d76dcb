"""`keywise force` and `keywise remove`: write or delete one key in the sink."""

from typing import Annotated, Any

import typer

from keywise.cli.admin_options import (
    WAIT_DEFAULT,
    AdminOptions,
    KeyArgument,
    OneOption,
    WaitOption,
    WhoOption,
    WhyOption,
    change_json,
    perform,
    require_valid_key,
)
from keywise.cli.app_loader import AppOption, JsonOption
from keywise.cli.output import plain, print_json
from keywise.core.change import VERSION_MIN, Change, is_unversioned
from keywise.flow.pipeline import Pipeline
from keywise.operate.admin import PipelineAdmin


def force(  # noqa: PLR0913 - one parameter per option
    key: KeyArgument,
    *,
    older: Annotated[bool, typer.Option("--older", help="Write even if it is older than the mark.")] = False,
    wait: WaitOption = WAIT_DEFAULT,
    app: AppOption = None,
    pipeline: OneOption = None,
    why: WhyOption = "",
    who: WhoOption = "",
    json: JsonOption = False,
) -> None:
    """Write a key again, as it is in the source of truth now.

    Reads the key with refetch, claims it, and writes it above the mark: the next version still wins.
    It works on a paused key too.

    \b
    Example:
      keywise force page-17 --why 'edited by hand' --app shop:app
    """

    async def act(admin: PipelineAdmin, opened: Pipeline) -> tuple[str, Change[Any]]:
        return opened.name, await admin.force(require_valid_key(key), older=older)

    name, change = perform(AdminOptions(app, pipeline, why, who, wait), act)
    if json:
        print_json({"pipeline": name} | change_json(change))
    else:
        what = "its deletion, because refetch has no such key" if change.deleted else "what refetch returned"
        print(plain(f"forced {key!r} in {name}: wrote {what}, at {_order(change)}"))


def remove(  # noqa: PLR0913 - one parameter per option
    key: KeyArgument,
    *,
    wait: WaitOption = WAIT_DEFAULT,
    app: AppOption = None,
    pipeline: OneOption = None,
    why: WhyOption = "",
    who: WhoOption = "",
    json: JsonOption = False,
) -> None:
    """Delete a key from the sink; its next version brings it back.

    Claims the key, and writes the deletion above the mark. It works on a paused key too.

    \b
    Example:
      keywise remove page-17 --why 'published by mistake' --app shop:app
    """

    async def act(admin: PipelineAdmin, opened: Pipeline) -> tuple[str, Change[Any]]:
        return opened.name, await admin.remove(require_valid_key(key))

    name, change = perform(AdminOptions(app, pipeline, why, who, wait), act)
    if json:
        print_json({"pipeline": name} | change_json(change))
        return
    next_one = "its next version brings it back"
    if is_unversioned(change.order) and change.order[1] != VERSION_MIN:
        next_one = "without versions nothing is newer: run keywise reset, so that the next change wins"
    print(plain(f"removed {key!r} from {name}, at {_order(change)}; {next_one}"))


def _order(change: Change[Any]) -> str:
    era, version, generation = change.order
    parts = [f"era {era}"] if era else []
    if version == VERSION_MIN:
        parts.append("the lowest order")
    elif change.version is None:
        parts.append("no version")
    else:
        parts += [f"version {version}", *([f"generation {generation}"] if generation else [])]
    return ", ".join(parts)
