"""`keywise force` and `keywise remove`: write or delete one key in the sink."""

import sys
from typing import Annotated, Any

import typer

from keywise.cli.admin_options import WAIT_DEFAULT, AdminOptions, WaitOption, perform, require_stored_queue
from keywise.cli.options import grouped, require_valid_key
from keywise.cli.output import plain, print_result
from keywise.core.change import VERSION_MIN, Change, is_unversioned
from keywise.core.errors import AdminError
from keywise.operate.admin import PipelineAdmin

KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="The key, or the URI of an object.")]


@grouped
def force(
    key: KeyArgument,
    *,
    older: Annotated[bool, typer.Option("--older", help="Write even if it is older than the mark.")] = False,
    wait: WaitOption = WAIT_DEFAULT,
    options: AdminOptions,
) -> None:
    """Write a key again, as it is in the source of truth now.

    Reads the key from refetch or the origin, claims it, and writes it above the mark: the next version still wins.
    It works on a paused key too.
    An object is announced again, at an order above all that was seen of it, and a worker reads it as a whole.

    \b
    Example:
      keywise force page-17 --why 'edited by hand' --app shop:app
      keywise force s3://uploads/2026/a.ndjson --app shop:app
    """

    async def act(admin: PipelineAdmin) -> tuple[Change[Any], str, str]:
        has_objects = require_stored_queue(admin.pipeline)
        if older and has_objects:
            raise AdminError("an object is read as the store has it now; leave out --older")
        change = await admin.force(require_valid_key(key), older=older)
        if has_objects:
            return change, await _next_step(admin, change, "reads it"), ""
        return change, "", await _beside(admin, change)

    name, (change, next_step, warning) = perform(options, act, wait)
    if next_step:
        text = f"announced {key!r} again in {name}, at {_order(change)}; {next_step}"
        print_result(_change_json(name, change), text, json=options.json)
        return
    what = (
        "its deletion, because the source of truth has no such key"
        if change.deleted
        else "what refetch or the origin returned"
    )
    text = f"forced {key!r} in {name}: wrote {what}, at {_order(change)}"
    print_result(_change_json(name, change), text, json=options.json)
    if warning:
        print(plain(f"Warning: {warning}"), file=sys.stderr)


@grouped
def remove(
    key: KeyArgument,
    *,
    wait: WaitOption = WAIT_DEFAULT,
    options: AdminOptions,
) -> None:
    """Delete a key from the sink; its next version brings it back.

    Claims the key, and writes the deletion above the mark. It works on a paused key too.
    Of an object, a worker deletes the records, and the object itself stays in its store.

    \b
    Example:
      keywise remove page-17 --why 'published by mistake' --app shop:app
    """

    async def act(admin: PipelineAdmin) -> tuple[Change[Any], str]:
        has_objects = require_stored_queue(admin.pipeline)
        change = await admin.remove(require_valid_key(key))
        return change, await _next_step(admin, change, "deletes its records") if has_objects else ""

    name, (change, next_step) = perform(options, act, wait)
    if next_step:
        text = f"announced {key!r} again in {name}, as removed, at {_order(change)}; {next_step}"
        print_result(_change_json(name, change), text, json=options.json)
        return
    next_one = "its next version brings it back"
    if is_unversioned(change.order) and change.order[1] != VERSION_MIN:
        next_one = "without versions nothing is newer: run keywise reset, so that the next change wins"
    text = f"removed {key!r} from {name}, at {_order(change)}; {next_one}"
    print_result(_change_json(name, change), text, json=options.json)


async def _beside(admin: PipelineAdmin, change: Change[Any]) -> str:
    """Say that the target beside the live one does not get a write; empty if it does, or if there is no such target.

    Passes compare versions, so they do not see that a row was written again at the version that both targets have.
    """
    controls = await admin.pipeline.control_store.controls()
    run = controls.run
    other = run.into if run is not None and run.is_active and run.is_beside else controls.spare
    if not other or change.deleted or change.order[2] == 0:
        return ""
    return (
        f"{other}, beside the live target, does not get this write, because the version is not new; if the row has "
        "changed, write it upstream at a newer version, or build that target again before it goes live"
    )


async def _next_step(admin: PipelineAdmin, change: Change[Any], what: str) -> str:
    """Say what becomes of an object that was announced again."""
    is_paused = (await admin.pipeline.control_store.controls()).pauses_key(change.key)
    return f"a worker {what}" if not is_paused else f"it is paused, and a worker {what} once it is resumed"


def _change_json(pipeline: str, change: Change[Any]) -> dict[str, Any]:
    """Return the change that was written as JSON fields."""
    era, _, generation = change.order
    place = {"pipeline": pipeline, "key": change.key, "era": era, "version": change.version}
    return place | {"generation": max(0, generation), "deleted": change.deleted}


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
