"""`keywise pause` and `keywise resume`: stop and continue the processing of keys."""

import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from keywise.cli.admin_options import AdminOptions, YesOption, confirm, perform
from keywise.cli.options import grouped, require_valid_key
from keywise.cli.output import count, fail, plain, print_json, print_result, refuse
from keywise.core.controls import EVERYTHING, Controls
from keywise.flow.pipeline import OpenPipeline
from keywise.operate.admin import PipelineAdmin, keys_like

PAUSES_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class KeysOptions:
    """The keys of a command: one, those that match a pattern, or all."""

    key: Annotated[str | None, typer.Argument(metavar="KEY", help="One key.")] = None
    pattern: Annotated[
        str | None, typer.Option("--pattern", metavar="PATTERN", help="All keys that match, with *, ? and [abc].")
    ] = None
    every: Annotated[bool, typer.Option("--all", help="The whole pipeline.")] = False

    def chosen(self) -> tuple[str, bool]:
        """Return the keys, and whether they are a pattern; exit with status 2 unless exactly one option names them."""
        if (self.key is not None) + (self.pattern is not None) + self.every != 1:
            refuse("name a key, or say --pattern 'page-*', or --all")
        if self.key is not None:
            return require_valid_key(self.key), False
        if self.every or (self.pattern is not None and set(self.pattern) == {EVERYTHING}):
            return EVERYTHING, True
        return require_valid_key(self.pattern or ""), True


@grouped
def pause(
    *,
    chosen: KeysOptions,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until no claim on these keys is held.")] = False,
    yes: YesOption = False,
    options: AdminOptions,
) -> None:
    """Pause one key, the keys that match a pattern, or all keys.

    No worker claims them any more, and their messages wait; what is claimed already is finished.
    Pausing again replaces the pause.

    \b
    Example:
      keywise pause page-17 --why 'wrong prices' --app shop:app
      keywise pause --pattern 'page-*' --wait --app shop:app
      keywise pause --all --wait --yes --app shop:app
    """
    keys, is_pattern = chosen.chosen()

    async def act(admin: PipelineAdmin) -> bool:
        if is_pattern and not yes:
            await _ask("Pause", keys, admin.pipeline)
        before = await admin.pause(keys, is_pattern=is_pattern)
        if not options.json:
            again = f"; it was paused already, by {before.by or 'an unknown user'}" if before is not None else ""
            print(plain(f"paused {named(keys, is_pattern)} in {admin.pipeline.name}{again}"), flush=True)
        if wait:
            await admin.until_free(keys, is_pattern=is_pattern)
        return before is not None

    name, was_paused = perform(options, act, wait=None)
    if options.json:
        result = {"pipeline": name, "paused": keys, "is_pattern": is_pattern, "was_paused": was_paused}
        print_json(result | {"claims": 0} if wait else result)
    elif wait:
        print("no claim is held any more")


@grouped
def resume(chosen: KeysOptions, *, yes: YesOption = False, options: AdminOptions) -> None:
    """End a pause; name it exactly as it was set.

    Exits with status 1 if there is no such pause.

    \b
    Example:
      keywise resume page-17 --app shop:app
      keywise resume --pattern 'page-*' --app shop:app
      keywise resume --all --yes --app shop:app
    """
    keys, is_pattern = chosen.chosen()

    async def act(admin: PipelineAdmin) -> tuple[bool, Controls]:
        store = admin.pipeline.control_store
        pauses = (await store.controls()).pauses
        if is_pattern and not yes and any((one.keys, one.is_pattern) == (keys, True) for one in pauses):
            await _ask("Resume", keys, admin.pipeline)
        return await admin.resume(keys, is_pattern=is_pattern), await store.controls()

    name, (ended, controls) = perform(options, act)
    if not ended:
        paused = f"paused are: {_names(controls)}" if controls.pauses else "nothing is"
        fail(f"{named(keys, is_pattern)} is not paused in {name}; {paused}")
    result = {"pipeline": name, "resumed": keys, "is_pattern": is_pattern, "pauses": len(controls.pauses)}
    print_result(result, f"resumed {named(keys, is_pattern)} in {name}", json=options.json)
    others = _others(controls, keys, is_pattern)
    if others and not options.json:
        print_note(others)


def named(keys: str, is_pattern: bool) -> str:
    if not is_pattern:
        return repr(keys)
    return "every key" if keys == EVERYTHING else f"keys like {keys!r}"


def print_note(note: str) -> None:
    """Print a note, which is not an error, on stderr."""
    print(plain(f"Note: {note}"), file=sys.stderr)


async def _ask(verb: str, keys: str, opened: OpenPipeline) -> None:
    """Ask for confirmation if the pattern covers every known key."""
    known = await keys_like(opened, keys)
    if known is not None and (known or keys == EVERYTHING):
        every = "" if keys == EVERYTHING else ", which is every key"
        confirm(f"{verb} {named(keys, True)}{every} of {opened.name} ({count(known, 'known key')})?", yes=False)


def _names(controls: Controls) -> str:
    """List some of the pauses; patterns come first, because they cover the most keys."""
    pauses = sorted(controls.pauses, key=lambda one: (not one.is_pattern, one.keys))
    names = ", ".join(named(one.keys, one.is_pattern) for one in pauses[:PAUSES_NAMED])
    return names + (f" and {len(pauses) - PAUSES_NAMED:,} more" if len(pauses) > PAUSES_NAMED else "")


def _others(controls: Controls, keys: str, is_pattern: bool) -> str:
    """Describe other pauses that the user may have meant; empty if there are none."""
    related = [one for one in controls.pauses if is_pattern or one.covers(keys)]
    patterns = [named(one.keys, True) for one in related if one.is_pattern]
    count_of_keys = sum(not one.is_pattern for one in related)
    texts = [*patterns[:5], *([count(count_of_keys, "key")] if count_of_keys else [])]
    return f"still paused: {', '.join(texts)}" if texts else ""
