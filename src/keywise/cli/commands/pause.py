"""`keywise pause` and `keywise resume`: stop and continue the processing of keys."""

import sys
from typing import Annotated, Any

import typer

from keywise.cli.admin_options import (
    AdminOptions,
    OneOption,
    WhoOption,
    WhyOption,
    YesOption,
    confirm,
    perform,
    require_valid_key,
)
from keywise.cli.app_loader import AppOption, JsonOption
from keywise.cli.output import count, fail, plain, print_json, refuse
from keywise.core.controls import EVERYTHING, Controls
from keywise.flow.pipeline import Pipeline
from keywise.operate.admin import PipelineAdmin, keys_like

KeyOption = Annotated[str | None, typer.Argument(metavar="KEY", help="One key.")]
PatternOption = Annotated[
    str | None, typer.Option("--pattern", metavar="PATTERN", help="All keys that match, with *, ? and [abc].")
]
AllOption = Annotated[bool, typer.Option("--all", help="The whole pipeline.")]


def pause(  # noqa: PLR0913 - one parameter per option
    key: KeyOption = None,
    *,
    pattern: PatternOption = None,
    every: AllOption = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until no claim on these keys is held.")] = False,
    yes: YesOption = False,
    app: AppOption = None,
    pipeline: OneOption = None,
    why: WhyOption = "",
    who: WhoOption = "",
    json: JsonOption = False,
) -> None:
    """Pause one key, the keys that match a pattern, or all keys.

    No new work begins on them, and their messages wait; work that has begun is finished.
    Pausing again replaces the pause.

    \b
    Example:
      keywise pause page-17 --why 'wrong prices' --app shop:app
      keywise pause --pattern 'page-*' --wait --app shop:app
      keywise pause --all --wait --yes --app shop:app
    """
    keys, is_pattern = meant(key, pattern, every)

    async def act(admin: PipelineAdmin, opened: Pipeline) -> dict[str, Any]:
        if is_pattern:
            await _ask("Pause", keys, opened, every=every, yes=yes)
        before = await admin.pause(keys, is_pattern=is_pattern)
        if not json:
            again = f"; it was paused already, by {before.by or 'an unknown user'}" if before is not None else ""
            print(plain(f"paused {named(keys, is_pattern)} in {opened.name}{again}"), flush=True)
        if wait:
            await admin.until_free(keys, is_pattern=is_pattern)
        result = {"pipeline": opened.name, "paused": keys, "is_pattern": is_pattern, "was_paused": before is not None}
        return result | {"claims": 0} if wait else result

    result = perform(AdminOptions(app, pipeline, why, who, None), act)
    if json:
        print_json(result)
    elif wait:
        print("no claim is held any more")


def resume(  # noqa: PLR0913 - one parameter per option
    key: KeyOption = None,
    *,
    pattern: PatternOption = None,
    every: AllOption = False,
    yes: YesOption = False,
    app: AppOption = None,
    pipeline: OneOption = None,
    why: WhyOption = "",
    who: WhoOption = "",
    json: JsonOption = False,
) -> None:
    """End a pause; name it exactly as it was set.

    Exits with status 1 if there is no such pause.

    \b
    Example:
      keywise resume page-17 --app shop:app
      keywise resume --pattern 'page-*' --app shop:app
      keywise resume --all --yes --app shop:app
    """
    keys, is_pattern = meant(key, pattern, every)

    async def act(admin: PipelineAdmin, opened: Pipeline) -> tuple[str, Controls, bool]:
        controls = await opened.control_store.controls()
        if is_pattern and any((one.keys, one.is_pattern) == (keys, True) for one in controls.pauses):
            await _ask("Resume", keys, opened, every=every, yes=yes)
        ended = await admin.resume(keys, is_pattern=is_pattern)
        return opened.name, await opened.control_store.controls(), ended

    name, controls, ended = perform(AdminOptions(app, pipeline, why, who), act)
    others = _others(controls, keys, is_pattern)
    if not ended:
        fail(f"{named(keys, is_pattern)} is not paused in {name}; {others or 'nothing is'}")
    if json:
        print_json({"pipeline": name, "resumed": keys, "is_pattern": is_pattern, "pauses": len(controls.pauses)})
        return
    print(plain(f"resumed {named(keys, is_pattern)} in {name}"))
    if others:
        note_that(others)


def meant(key: str | None, pattern: str | None, every: bool) -> tuple[str, bool]:
    """Return the keys, and whether they are a pattern; exit with status 2 unless exactly one option names them."""
    if (key is not None) + (pattern is not None) + every != 1:
        refuse("name a key, or say --pattern 'page-*', or --all")
    if key is not None:
        return require_valid_key(key), False
    if every or (pattern is not None and set(pattern) == {EVERYTHING}):
        return EVERYTHING, True
    return require_valid_key(pattern or ""), True


def named(keys: str, is_pattern: bool) -> str:
    if not is_pattern:
        return repr(keys)
    return "every key" if keys == EVERYTHING else f"keys like {keys!r}"


def note_that(note: str) -> None:
    """Print a note, which is not an error, on stderr."""
    print(plain(f"Note: {note}"), file=sys.stderr)


async def _ask(verb: str, keys: str, opened: Pipeline, *, every: bool, yes: bool) -> None:
    """Ask for confirmation if the pattern covers every known key."""
    if yes:
        return
    known = await keys_like(opened, keys)
    if known is not None and (known or every or keys == EVERYTHING):
        named_keys = named(keys, True)
        named_keys = f"{named_keys}, which is every key" if keys != EVERYTHING else named_keys
        confirm(f"{verb} {named_keys} of {opened.name} ({count(known, 'known key')})?", yes=yes)


def _others(controls: Controls, keys: str, is_pattern: bool) -> str:
    """Describe other pauses that the user may have meant; empty if there are none."""
    if is_pattern:
        related = controls.pauses
    else:
        related = tuple(one for one in controls.pauses if one.covers(keys))
    patterns = [named(one.keys, True) for one in related if one.is_pattern]
    count_of_keys = sum(not one.is_pattern for one in related)
    texts = [*patterns[:5], *([count(count_of_keys, "key")] if count_of_keys else [])]
    return f"still paused: {', '.join(texts)}" if texts else ""
