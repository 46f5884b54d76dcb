"""`keywise serial`: shows the requests of serial functions, switches keys on and off, and cancels requests."""

import asyncio
import base64
import enum
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, TypeVar

import typer
from msgspec.structs import replace

from keywise.cli.admin_options import WhoOption, WhyOption, audit_note
from keywise.cli.app_loader import AppOption, JsonOption, load, warn_if_in_memory
from keywise.cli.commands.pause import KeysOptions, named, print_note
from keywise.cli.group import CommandGroup
from keywise.cli.options import grouped, parse_duration, require_storable, require_valid_key, suggestion
from keywise.cli.output import count, duration, fail, iso, plain, print_json, print_table, refuse, stamp
from keywise.core.serial.contract import CountsLostSessions, Ending, KeyState, Mode, Record, Switch
from keywise.serial.function import SerialFunction
from keywise.serial.mode_transitions import removed, settled
from keywise.serial.modes import LOOK_S

T = TypeVar("T")

app = typer.Typer(cls=CommandGroup, help="Show and cancel serial requests, and switch keys.", no_args_is_help=True)

FunctionOption = Annotated[
    str | None, typer.Option("--function", metavar="NAME", help="The serial function, if the app has more than one.")
]
LimitOption = Annotated[int, typer.Option("--limit", min=1, help="How many to show at most.")]
LIMIT = 50
ASKER_MAX = 40
"""How many characters of the caller's name a table shows."""


class ModeChoice(enum.StrEnum):
    """The modes that a key can be switched to."""

    ON = "on"
    OBSERVE = "observe"
    OFF = "off"
    DEFAULT = "default"


_MODES = {ModeChoice.ON: Mode.ON, ModeChoice.OBSERVE: Mode.OBSERVE, ModeChoice.OFF: Mode.OFF}


@app.command()
def status(
    *, function: FunctionOption = None, limit: LimitOption = LIMIT, app: AppOption = None, json: JsonOption = False
) -> None:
    """Show which keys have requests that wait or run, and which are switched.

    \b
    Example:
      keywise serial status --app clinic:app
      keywise serial status --function accept --json --app clinic:app
    """

    async def look(operator: Any, backend: Any) -> tuple[float, list[KeyState], list[Switch], int]:
        losses = await operator.sessions_lost() if isinstance(operator, CountsLostSessions) else 0
        return await operator.now(), await operator.states(limit), await operator.switches(), losses

    name, (now, states, switches, losses) = _with(app, function, look)
    if json:
        result = {
            "keys": [_state_json(state) for state in states],
            "switches": [_switch_json(one, now) for one in switches],
        }
        print_json({"function": name, **result, "sessions_lost": losses})
        return
    print(plain(f"{name}: {count(sum(state.waiting for state in states), 'request')} waiting"))
    if states:
        rows = []
        for state in states:
            since = f"{duration(max(0.0, now - state.since))} ago"
            rows.append((state.key, str(state.waiting), str(state.running), since, state.owner))
        columns = ("key", "waiting", "running", "since", "held by")
        print_table(columns, rows, numbers=("waiting", "running"), fold=("key",))
    for one in switches:
        print(plain(_switched(one, now)))
    if losses:
        print(
            plain(
                f"lost with the locks of running calls: {count(losses, 'session')}; the log of the server may say why"
            )
        )


@app.command()
@grouped
def switch(  # noqa: PLR0913 - one parameter per option
    mode: Annotated[ModeChoice, typer.Argument(help="The mode of these keys; default removes the switch.")],
    selection: KeysOptions,
    *,
    settle: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="How long keys that were off stay in observe before they are on."),
    ] = None,
    function: FunctionOption = None,
    app: AppOption = None,
    who: WhoOption = "",
    json: JsonOption = False,
) -> None:
    """Switch keys on, to observe, or off, while the app runs.

    A key that was off stays in observe until the last call that started without the lock must have finished: as long
    as a process may have an old view of the switches, plus the time that a call may take. To remove such a switch, run
    the command twice: the first one starts this time, the second one removes the switch after it.

    \b
    Example:
      keywise serial switch observe --all --app clinic:app
      keywise serial switch on Denver/2026-12-01 --app clinic:app
      keywise serial switch off --pattern 'Denver/*' --app clinic:app
      keywise serial switch default --all --app clinic:app
    """
    keys, is_pattern = selection.chosen()
    if settle is not None and mode in (ModeChoice.OFF, ModeChoice.OBSERVE):
        refuse(f"--settle says how long keys are observed before they are on; {mode} takes effect at once")
    settle_s = None if settle is None else parse_duration(settle, "--settle")
    by = audit_note(who).who
    chosen = _chosen(app, function)

    async def act(operator: Any, backend: Any) -> tuple[float, Switch | None]:
        now, before = await operator.now(), await operator.switches()
        requested = Switch(keys=keys, is_pattern=is_pattern, mode=_MODES.get(mode, Mode.ON), at=now, by=by)
        is_set = any((one.keys, one.is_pattern) == (keys, is_pattern) for one in before)
        if mode is ModeChoice.DEFAULT and not is_set:
            fail(f"{named(keys, is_pattern)} is not switched")
        rule = removed if mode is ModeChoice.DEFAULT else settled
        made = rule(requested, before, chosen.mode, chosen.settings.view_s + LOOK_S + chosen.settings.timeout_s)
        if made is not None and settle_s is not None:
            made = replace(made, observe_until=now + settle_s) if settle_s or mode is ModeChoice.ON else None
        await operator.switch(made, keys, is_pattern)
        return now, made

    now, made = _opened(chosen, act)
    name = chosen.name
    if json:
        print_json({"function": name, "switch": None if made is None else _switch_json(made, now)})
    elif made is None:
        print(plain(f"{named(keys, is_pattern)} of {name} is not switched any more"))
    else:
        print(plain(_switched(made, now)))
        if mode is ModeChoice.DEFAULT:
            print_note("calls may still run without the lock; to remove the switch, run this again after that time")


@app.command()
def history(
    key: Annotated[str | None, typer.Argument(metavar="KEY", help="One key.")] = None,
    *,
    limit: LimitOption = LIMIT,
    function: FunctionOption = None,
    app: AppOption = None,
    json: JsonOption = False,
) -> None:
    """Show requests, the newest first: who called, their places, when they ran, and how they ended.

    \b
    Example:
      keywise serial history --app clinic:app
      keywise serial history Denver/2026-12-01 --limit 5 --json --app clinic:app
    """

    if key is not None:
        require_valid_key(key)

    async def look(operator: Any, backend: Any) -> list[Record]:
        found: list[Record] = await operator.history(key, limit)
        return found

    name, records = _with(app, function, look)
    if json:
        print_json({"function": name, "requests": [_record_json(record) for record in records]})
        return
    if not records:
        print(plain(f"{name}: no request is kept" + (f" of {key!r}" if key is not None else "")))
        return
    columns = ("asked", "key", "place", "id", "asked by", "waited", "ran", "ended")
    print_table(columns, map(_row, records), numbers=("place",), fold=("key", "id", "asked by", "ended"))


@app.command()
def cancel(
    ids: Annotated[list[str], typer.Argument(metavar="ID", help="As shown by keywise serial history.")],
    *,
    function: FunctionOption = None,
    app: AppOption = None,
    why: WhyOption = "",
    who: WhoOption = "",
    json: JsonOption = False,
) -> None:
    """Cancel requests that wait. Their callers get an error.

    Requests that run or have ended are left alone. Exits with status 1 if one of them was not waiting.

    \b
    Example:
      keywise serial cancel request-17 --why 'wrong market' --app clinic:app
    """
    for id in ids:
        require_storable(id, "an id")
    by = audit_note(who, why)
    cause = f"by {by.who}" + (f": {why}" if why else "")

    async def act(operator: Any, backend: Any) -> list[str]:
        ended: list[str] = await backend.withdraw(ids, Ending.CANCELLED, cause)
        return ended

    name, ended = _with(app, function, act)
    others = [id for id in ids if id not in ended]
    if json:
        print_json({"function": name, "cancelled": ended, "left_alone": others})
        if others:
            raise typer.Exit(1)
        return
    for id in ended:
        print(plain(f"cancelled {id!r} of {name}"))
    if others:
        fail(f"{', '.join(map(repr, others))} of {name} was not waiting: running, ended, or unknown")


def _chosen(target: str | None, name: str | None) -> SerialFunction:
    loaded = load(target)
    if not loaded.serials:
        fail("this app has no serial function; define one with @app.serial(...)")
    if name is None:
        if len(loaded.serials) > 1:
            refuse(
                f"this app has more than one serial function; say which with --function: {', '.join(loaded.serials)}"
            )
        [name] = loaded.serials
    if name not in loaded.serials:
        known = f"this app has: {', '.join(loaded.serials)}"
        refuse(f"no serial function is called {name!r}; {suggestion(name, loaded.serials, known)}")
    warn_if_in_memory(loaded)
    return loaded.serials[name]


def _with(target: str | None, name: str | None, act: Callable[[Any, Any], Coroutine[Any, Any, T]]) -> tuple[str, T]:
    """Open the backend of the chosen function, and run an action on it."""
    chosen = _chosen(target, name)
    return chosen.name, _opened(chosen, act)


def _opened(chosen: SerialFunction, act: Callable[[Any, Any], Coroutine[Any, Any, T]]) -> T:
    async def opened() -> T:
        async with chosen.connect() as backend:
            return await act(backend.operator, backend)

    return asyncio.run(opened())


def _switched(switch: Switch, now: float) -> str:
    text = f"{named(switch.keys, switch.is_pattern)}: {switch.mode}"
    if switch.mode_at(now) is not switch.mode:
        text = f"{text}, and until {stamp(switch.observe_until)} only observed"
    return f"{text} (by {switch.by or 'an unknown user'}, {stamp(switch.at)})"


def _row(record: Record) -> tuple[object, ...]:
    request, began = record.request, record.started_at or record.ended_at
    waited = duration(max(0.0, began - record.asked_at)) if began else ""
    ran = duration(max(0.0, record.ended_at - record.started_at)) if record.started_at and record.ended_at else ""
    return stamp(record.asked_at), request.key, str(record.place), request.id, _asker(record), waited, ran, _end(record)


def _asker(record: Record) -> str:
    asked_by = record.request.asked_by
    return asked_by if len(asked_by) <= ASKER_MAX else f"{asked_by[: ASKER_MAX - 1]}…"


def _end(record: Record) -> str:
    if record.reply is None:
        return "runs" if record.token else "waits"
    return f"{record.reply.outcome}: {record.reply.cause}" if record.reply.cause else record.reply.outcome.value


def _state_json(state: KeyState) -> dict[str, Any]:
    fields = {"key": state.key, "waiting": state.waiting, "running": state.running, "owner": state.owner or None}
    return fields | {"since": iso(state.since), "overlaps": state.overlaps}


def _switch_json(switch: Switch, now: float) -> dict[str, Any]:
    fields = {"keys": switch.keys, "is_pattern": switch.is_pattern, "mode": switch.mode.value, "by": switch.by}
    until = switch.observe_until if switch.mode is Mode.ON and switch.observe_until > now else None
    return fields | {"at": iso(switch.at), "observe_until": iso(until)}


def _record_json(record: Record) -> dict[str, Any]:
    request, reply = record.request, record.reply
    return {
        "id": request.id,
        "key": request.key,
        "place": record.place,
        "asked_by": request.asked_by,
        "mode": request.mode.value,
        "asked_at": iso(record.asked_at),
        "started_at": iso(record.started_at or None),
        "ended_at": iso(record.ended_at or None),
        "owner": record.owner or None,
        "attempts": record.attempts,
        "overlaps": record.overlaps,
        "outcome": None if reply is None else reply.outcome.value,
        "cause": None if reply is None else reply.cause or None,
        "request": _text(request.body),
        "answer": None if reply is None or reply.outcome is not Ending.DONE else _text(reply.body),
    }


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return base64.b64encode(body).decode()
