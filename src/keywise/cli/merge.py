"""`keywise merge`: what waits and runs one at a time per key, its history, its switches, and taking a request out."""

import asyncio
import base64
import difflib
import enum
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, TypeVar

import typer

from keywise.calling import SerialFunction
from keywise.cli.acting import Call, WhoOption, WhyOption, duration_of, mandate
from keywise.cli.loading import AppOption, JsonOption, load, warn_of_memory
from keywise.cli.pause import AllOption, KeyOption, PatternOption, meant, named
from keywise.cli.speech import cell, count, display, duration, fail, iso, plain, refuse, stamp, table, tell_json
from keywise.turn import Ending, KeyState, Mode, Record, Switch

T = TypeVar("T")

app = typer.Typer(help="Look at requests that wait their turn, and switch or end them.", no_args_is_help=True)

FunctionOption = Annotated[
    str | None, typer.Option("--function", metavar="NAME", help="The serial function, if the app has more than one.")
]
LimitOption = Annotated[int, typer.Option("--limit", min=1, help="How many are shown, at the most.")]
LIMIT = 50


class Choice(enum.StrEnum):
    """What a key can be switched to."""

    ON = "on"
    OBSERVE = "observe"
    OFF = "off"
    DEFAULT = "default"


@app.command()
def status(
    *, function: FunctionOption = None, limit: LimitOption = LIMIT, app: AppOption = None, json: JsonOption = False
) -> None:
    """Show which keys have requests that wait or run, and which are switched.

    \b
    Example:
      keywise merge status --app clinic:app
      keywise merge status --function accept --json --app clinic:app
    """

    async def look(operator: Any, turns: Any) -> tuple[float, list[KeyState], list[Switch], int]:
        losses = await operator.sessions_lost() if hasattr(operator, "sessions_lost") else 0
        return await operator.now(), await operator.states(limit), await operator.switches(), losses

    name, (now, states, switches, losses) = _with(app, function, look)
    if json:
        told = {"keys": [_state_told(state) for state in states], "switches": [_switch_told(one) for one in switches]}
        tell_json({"function": name, **told, "sessions_lost": losses})
        return
    print(plain(f"{name}: {count(sum(state.waiting for state in states), 'request')} waiting"))
    if states:
        made = table("key", "waiting", "running", "since", "held by", numbers=("waiting", "running"), fold=("key",))
        for state in states:
            since = f"{duration(max(0.0, now - state.since))} ago"
            made.add_row(cell(state.key), str(state.waiting), str(state.running), since, cell(state.owner))
        display(made)
    for one in switches:
        print(plain(_switched(one, now)))
    if losses:
        print(
            plain(
                f"lost with the locks of running calls: {count(losses, 'session')}; the log of the server may say why"
            )
        )


@app.command()
def switch(  # noqa: PLR0913 - all the words that the command understands
    mode: Annotated[Choice, typer.Argument(help="What these keys are switched to; default removes the switch.")],
    key: KeyOption = None,
    *,
    pattern: PatternOption = None,
    every: AllOption = False,
    settle: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="How long keys that were off are only observed before they are on."),
    ] = None,
    function: FunctionOption = None,
    app: AppOption = None,
    who: WhoOption = "",
    json: JsonOption = False,
) -> None:
    """Switch keys on, to observe, or off, while the app runs.

    Keys that were off are observed until nobody can still run them without the store: for as long as a process may
    have an old view of the switches, and a call may last.

    \b
    Example:
      keywise merge switch observe --all --app clinic:app
      keywise merge switch on Denver/2026-12-01 --app clinic:app
      keywise merge switch off --pattern 'Denver/*' --app clinic:app
      keywise merge switch default --all --app clinic:app
    """
    keys, is_pattern = meant(key, pattern, every)
    settle_s = None if settle is None else duration_of(settle, "--settle")

    async def act(operator: Any, turns: Any) -> tuple[float, Switch | None]:
        now, before = await operator.now(), await operator.switches()
        if mode is Choice.DEFAULT:
            if not any((one.keys, one.is_pattern) == (keys, is_pattern) for one in before):
                fail(f"{named(keys, is_pattern)} is not switched")
            await operator.switch(None, keys, is_pattern)
            return now, None
        was_off = chosen.mode is Mode.OFF or any(one.mode is Mode.OFF for one in before)
        usual_s = chosen.settings.view_s + chosen.settings.timeout_s if was_off else 0.0
        until = now + (usual_s if settle_s is None else settle_s) if mode is Choice.ON else 0.0
        made = Switch(
            keys=keys,
            is_pattern=is_pattern,
            mode=Mode(mode.value),
            observe_until=until if until > now else 0.0,
            at=now,
            by=mandate(Call(None, None, "", who)).who,
        )
        await operator.switch(made)
        return now, made

    chosen = _chosen(app, function)
    name, (now, made) = _with(app, function, act)
    if json:
        tell_json({"function": name, "switch": None if made is None else _switch_told(made)})
    elif made is None:
        print(plain(f"{named(keys, is_pattern)} of {name} is not switched any more"))
    else:
        print(plain(_switched(made, now)))


@app.command()
def history(
    key: KeyOption = None,
    *,
    limit: LimitOption = LIMIT,
    function: FunctionOption = None,
    app: AppOption = None,
    json: JsonOption = False,
) -> None:
    """Show requests, the newest first: who asked, their places, when they ran, and how they ended.

    \b
    Example:
      keywise merge history --app clinic:app
      keywise merge history Denver/2026-12-01 --limit 5 --json --app clinic:app
    """

    async def look(operator: Any, turns: Any) -> list[Record]:
        found: list[Record] = await operator.history(key, limit)
        return found

    name, records = _with(app, function, look)
    if json:
        tell_json({"function": name, "requests": [_record_told(record) for record in records]})
        return
    if not records:
        print(plain(f"{name}: no request is kept" + (f" of {key!r}" if key is not None else "")))
        return
    made = table("asked", "key", "place", "id", "asked by", "waited", "ran", "ended", numbers=("place",), fold=("id",))
    for record in records:
        waited, ran = _spans(record)
        row = (record.request.key, record.place, record.request.id, record.request.asked_by, waited, ran, _end(record))
        made.add_row(stamp(record.asked_at), *map(cell, row))
    display(made)


@app.command()
def cancel(
    ids: Annotated[list[str], typer.Argument(metavar="ID", help="As shown by keywise merge history.")],
    *,
    function: FunctionOption = None,
    app: AppOption = None,
    why: WhyOption = "",
    who: WhoOption = "",
    json: JsonOption = False,
) -> None:
    """Take requests out of the line; their callers are told. What runs or has ended is left alone.

    Exits with status 1 if one of them did not wait.

    \b
    Example:
      keywise merge cancel request-17 --why 'wrong market' --app clinic:app
    """
    by = mandate(Call(None, None, why, who))
    cause = f"by {by.who}" + (f": {why}" if why else "")

    async def act(operator: Any, turns: Any) -> list[str]:
        ended: list[str] = await turns.withdraw(ids, Ending.CANCELLED, cause)
        return ended

    name, ended = _with(app, function, act)
    others = [id for id in ids if id not in ended]
    if json:
        tell_json({"function": name, "cancelled": ended, "left_alone": others})
        if others:
            raise typer.Exit(1)
        return
    for id in ended:
        print(plain(f"cancelled {id!r} of {name}"))
    if others:
        fail(f"{', '.join(map(repr, others))} of {name} did not wait: running, ended, or not known")


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
        near = difflib.get_close_matches(name, loaded.serials, 1)
        known = f"this app has: {', '.join(loaded.serials)}"
        refuse(f"no serial function is called {name!r}; {f'did you mean {near[0]}?' if near else known}")
    warn_of_memory(loaded)
    return loaded.serials[name]


def _with(target: str | None, name: str | None, act: Callable[[Any, Any], Coroutine[Any, Any, T]]) -> tuple[str, T]:
    """Open the store of the one function that is meant."""
    chosen = _chosen(target, name)

    async def opened() -> T:
        async with chosen.connect() as turns:
            return await act(turns.operator, turns)

    return chosen.name, asyncio.run(opened())


def _switched(switch: Switch, now: float) -> str:
    told = f"{named(switch.keys, switch.is_pattern)}: {switch.mode}"
    if switch.mode_at(now) is not switch.mode:
        told = f"{told}, and until {stamp(switch.observe_until)} only observed"
    return f"{told} (by {switch.by or 'somebody'}, {stamp(switch.at)})"


def _spans(record: Record) -> tuple[str, str]:
    began = record.started_at or record.ended_at
    waited = duration(max(0.0, began - record.asked_at)) if began else ""
    ran = duration(max(0.0, record.ended_at - record.started_at)) if record.started_at and record.ended_at else ""
    return waited, ran


def _end(record: Record) -> str:
    if record.reply is None:
        return "runs" if record.token else "waits"
    return f"{record.reply.outcome}: {record.reply.cause}" if record.reply.cause else record.reply.outcome.value


def _state_told(state: KeyState) -> dict[str, Any]:
    told = {"key": state.key, "waiting": state.waiting, "running": state.running, "owner": state.owner or None}
    return told | {"since": iso(state.since), "overlaps": state.overlaps}


def _switch_told(switch: Switch) -> dict[str, Any]:
    told = {"keys": switch.keys, "is_pattern": switch.is_pattern, "mode": switch.mode.value, "by": switch.by}
    return told | {"at": iso(switch.at), "observe_until": iso(switch.observe_until or None)}


def _record_told(record: Record) -> dict[str, Any]:
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
