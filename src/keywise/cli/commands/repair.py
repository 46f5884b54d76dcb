"""`keywise repair`: repairs suspect keys now, without waiting for a worker."""

from typing import Annotated

import typer

from keywise.cli.admin_options import AdminOptions, perform, require_stored_queue
from keywise.cli.options import grouped, require_valid_key
from keywise.cli.output import count, fail, plain, print_json, print_result, refuse
from keywise.operate.admin import PipelineAdmin


@grouped
def repair(
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="KEY", help="These keys only; else all suspect keys.")
    ] = None,
    *,
    resynced: Annotated[
        bool, typer.Option("--resynced", help="Record that everything was written again: no full resync is due.")
    ] = False,
    options: AdminOptions,
) -> None:
    """Write suspect keys again from the source of truth.

    Reads them from refetch or the origin. A key can be repaired once no write of an earlier holder can land any more
    (the setting horizon); until then the command prints how long that takes. Exits with status 1 if a key was not
    repaired.
    A suspect object is announced again, and is not suspect any more when a worker has read it.

    \b
    Example:
      keywise repair --app shop:app
      keywise repair page-17 page-18 --app shop:app
      keywise repair --resynced --why 'reconciled after the outage' --app shop:app
    """
    requested = [require_valid_key(key) for key in keys or []]
    if resynced:
        if requested:
            refuse("--resynced is about the whole pipeline; leave the keys out")
        name, was_due = perform(options, PipelineAdmin.resynced)
        text = f"{name}: {'no full resync is due any more' if was_due else 'no full resync was due'}"
        print_result({"pipeline": name, "was_due": was_due}, text, json=options.json)
        return

    async def act(admin: PipelineAdmin) -> tuple[dict[str, str], str]:
        causes: dict[str, str] = {}
        done = "announced again" if require_stored_queue(admin.pipeline) else "repaired"
        async for key, cause in admin.repairs(requested):
            causes[key] = cause
            if not options.json:
                print(plain(f"left {key!r}: {cause}" if cause else f"{done} {key!r}"), flush=True)
        return causes, done

    name, (causes, done) = perform(options, act)
    left = [{"key": key, "cause": cause} for key, cause in causes.items() if cause]
    if options.json:
        print_json({"pipeline": name, done.replace(" ", "_"): [key for key in causes if not causes[key]], "left": left})
    elif not causes:
        print(plain(f"no key of {name} is suspect"))
    if left:
        fail(f"{count(len(left), 'key')} could not be repaired")
