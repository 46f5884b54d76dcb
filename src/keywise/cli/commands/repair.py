"""`keywise repair`: repairs suspect keys now, without waiting for a worker."""

from typing import Annotated, Any

import typer

from keywise.cli.admin_options import AdminOptions, OneOption, WhoOption, WhyOption, perform, require_valid_key
from keywise.cli.app_loader import AppOption, JsonOption
from keywise.cli.output import count, plain, print_error, print_json, refuse
from keywise.flow.pipeline import Pipeline
from keywise.operate.admin import PipelineAdmin


def repair(  # noqa: PLR0913 - one parameter per option
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="KEY", help="These keys only; else all suspect keys.")
    ] = None,
    *,
    resynced: Annotated[
        bool, typer.Option("--resynced", help="Record that everything was written again: no full resync is due.")
    ] = False,
    app: AppOption = None,
    pipeline: OneOption = None,
    why: WhyOption = "",
    who: WhoOption = "",
    json: JsonOption = False,
) -> None:
    """Write suspect keys again from the source of truth.

    Needs refetch. A key can be repaired once no write of an earlier holder can land any more (the setting horizon);
    until then the command prints how long that takes. Exits with status 1 if a key was not repaired.

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
        _end_resync(AdminOptions(app, pipeline, why, who), json)
        return

    async def act(admin: PipelineAdmin, opened: Pipeline) -> dict[str, Any]:
        repaired, left = list[str](), dict[str, str]()
        async for key, cause in admin.repairs(requested):
            if cause:
                left[key] = cause
            else:
                repaired.append(key)
            if not json:
                print(plain(f"repaired {key!r}") if not cause else plain(f"left {key!r}: {cause}"), flush=True)
        return {
            "pipeline": opened.name,
            "repaired": repaired,
            "left": [{"key": k, "cause": c} for k, c in left.items()],
        }

    result = perform(AdminOptions(app, pipeline, why, who), act)
    if json:
        print_json(result)
    elif not result["repaired"] and not result["left"]:
        print(plain(f"no key of {result['pipeline']} is suspect"))
    if result["left"]:
        print_error(f"{count(len(result['left']), 'key')} could not be repaired")
        raise typer.Exit(1)


def _end_resync(call: AdminOptions, json: bool) -> None:
    async def act(admin: PipelineAdmin, opened: Pipeline) -> dict[str, Any]:
        return {"pipeline": opened.name, "was_due": await admin.resynced()}

    result = perform(call, act)
    if json:
        print_json(result)
    else:
        text = "no full resync is due any more" if result["was_due"] else "no full resync was due"
        print(plain(f"{result['pipeline']}: {text}"))
