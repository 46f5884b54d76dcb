"""The requests of one serial function in a Postgres database, as one owner sees them: one round trip for each step."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import asyncpg
import msgspec

from keywise.adapters.postgres.database import PostgresDatabase, postgres_errors
from keywise.core.errors import DatabaseError, UnavailableError
from keywise.core.serial import rules
from keywise.core.serial.contract import Answered, Ending, Mode, Record, Reply, Request, Switch, Turn, TurnPolicy

CAUSES = [rules.TOO_LATE, rules.CALLER_GONE, rules.HOLDER_LOST, rules.LOST_AGAIN]
"""What the server writes down when it ends a request by itself, in the order that it knows."""
TRIES = 10
"""How often a step is tried again at once that met another one: on its id, or on a switch that was set."""


class Taking(msgspec.Struct, frozen=True):
    """How many turns are wished for, and how many in a row."""

    limit: int = 0
    run_max: int = 1


NOTHING = Taking()


class Stepper(Protocol):
    """A connection on which steps are made, or several."""

    async def step(self, statement: str, *arguments: object) -> Sequence[Any]: ...


class TurnTables:
    """The tables of turns, for one serial function and one owner."""

    def __init__(
        self, database: PostgresDatabase, function: str, owner: str, policy: TurnPolicy, lock: Stepper | None = None
    ) -> None:
        self.database = database
        self._stepper: Stepper = database if lock is None else lock
        """Where turns are taken: if they have locks, these belong to that session."""
        self._statement, self._back = (_STEP, _BACK) if lock is None else (_LOCKED_STEP, _LOCKED_BACK)
        self.name = function
        self.owner = storable(owner)
        self.policy = policy
        self.number = 0
        """Of the function."""
        self._switches: list[Switch] = []
        self._version = 0
        """Of the switches, as the store counts their changes."""

    async def open(self) -> None:
        await self.database.write(_REGISTER, self.name)
        [[self.number]] = await self.database.write(_NUMBER, self.name)
        await self.read_switches()

    async def read_switches(self) -> list[Switch]:
        rows = await self.database.read(_SWITCHES, self.number)
        self._version = rows[0][0] if rows else 0
        self._switches = [switch_of_row(row) for row in rows if row["keys"] is not None]
        return self._switches

    async def exchange(self, replies: Sequence[Reply], taking: Taking, requests: Sequence[Request] = ()) -> Answered:
        """Answer, ask and take."""
        for _ in range(TRIES):
            try:
                step = self._step(self._terms(taking), replies, requests)
                rows = await self._stepper.step(self._statement, *step)
            except DatabaseError as error:
                if isinstance(error.__cause__, asyncpg.UniqueViolationError):
                    # The same id was asked for with another key at the same moment; now it is known.
                    continue
                raise
            if not any(row["what"] == "old switches" for row in rows):
                return answered_of(rows, requests)
            await self.read_switches()
        raise UnavailableError(f"{self.database.name}: somebody else is at the same ids all the time")

    async def answer_within(self, connection: Any, replies: Sequence[Reply], taking: Taking) -> Answered:
        """In a transaction: what was answered before is refused."""
        with postgres_errors(self.database.name):
            terms = self._terms(taking, repeats=False)
            return answered_of(await connection.fetch(_STEP, *self._step(terms, replies, ())), ())

    async def give_back(self, turns: Sequence[Turn]) -> None:
        ids, tokens = [encoded(turn.request.id) for turn in turns], [turn.token for turn in turns]
        await self._stepper.step(self._back, self.number, self._terms(), ids, tokens)

    async def renew(self, tokens: Sequence[int], before: float | None) -> list[int]:
        arguments = (self.number, self._terms(), list(tokens), before)
        if before is None or self._stepper is self.database:
            rows = await self.database.step(_RENEW, *arguments)
        else:
            # What is given back has locks.
            rows = await self._stepper.step(_LOCKED_RENEW, *arguments)
        return [token for (token,) in rows]

    async def unlock(self, keys: Sequence[str]) -> None:
        """Give back locks of turns that were lost."""
        await self._stepper.step(_UNLOCK, self.number, [encoded(key) for key in keys])

    async def count_losses(self, losses: int) -> int:
        """Write down that a session with locks was lost so often."""
        await self.database.step(_COUNT, self.number, losses)
        return losses

    async def withdraw(self, ids: Sequence[str], outcome: Ending, cause: str) -> list[str]:
        codes = [encoded(id) for id in ids]
        arguments = (self.number, self._terms(), codes, outcome.value, storable(cause))
        ended = {decoded(code) for (code,) in await self.database.step(_WITHDRAW, *arguments)}
        return [id for id in dict.fromkeys(ids) if id in ended]

    async def replies(self, ids: Sequence[str]) -> dict[str, Reply]:
        lease_s = self.policy.lease_s
        rows = await self.database.step(_REPLIES, self.number, self.owner, lease_s, [encoded(id) for id in ids])
        return {decoded(row[0]): reply_of(decoded(row[0]), *row[1:]) for row in rows}

    def _terms(self, taking: Taking = NOTHING, *, repeats: bool = True) -> tuple[Any, ...]:
        policy = self.policy
        return (
            *(self.owner, policy.lease_s, policy.atomic, policy.attempts_max, CAUSES),
            *(self._version, repeats, min(taking.limit, _INT_MAX), min(taking.run_max, _INT_MAX)),
        )

    def _step(self, terms: tuple[Any, ...], replies: Sequence[Reply], requests: Sequence[Request]) -> tuple[Any, ...]:
        given = [(encoded(one.id), one.token, one.outcome.value, one.body, storable(one.cause)) for one in replies]
        return self.number, terms, given, [self._request(one) for one in requests]

    def _request(self, request: Request) -> tuple[Any, ...]:
        switch = rules.switch_of(request.key, self._switches) if self._switches else None
        return (
            *(encoded(request.id), encoded(request.key), request.body, storable(request.asked_by)),
            *(storable(request.runner), request.wait_s, request.mode.value),
            *((switch.mode.value, switch.observe_until) if switch is not None else (None, None)),
            list(request.within) or None,
        )


def answered_of(rows: Sequence[Mapping[str, Any]], requests: Sequence[Request]) -> Answered:
    """What a step has told, in the values of the protocol."""
    answered = Answered([], [], [None] * len(requests))
    for row in rows:
        number = row["number"] - 1
        match row["what"]:
            case "refused":
                answered.refused.append(decoded(row["answer"]))
            case "turn":
                answered.turns.append(turn_of(row["work"]))
            case "observed":
                answered.answers[number] = turn_of(row["work"])
            case "reply":
                told = (row["outcome"], row["answer"], row["cause"], row["answer_token"])
                answered.answers[number] = reply_of(requests[number].id, *told)
            case "clash":
                answered.answers[number] = rules.clash(requests[number], decoded(row["work"]["key"]))
            case "switched":
                answered.answers[number] = rules.switched(requests[number], Mode(row["cause"]))
            case "circle":
                answered.answers[number] = rules.refusal(requests[number], circle_cause_of(row["cause"]))
    return answered


def turn_of(row: Any) -> Turn:
    return rules.turn_of(record_of(row), row["started_at"])


def record_of(row: Any, reply: Reply | None = None, ended_at: float = 0.0) -> Record:
    """What a row of work, or of what is completed, remembers."""
    request = Request(
        id=decoded(row["id"]),
        key=decoded(row["key"]),
        body=row["body"],
        asked_by=row["asked_by"],
        runner=row["runner"],
        wait_s=row["wait_s"],
        within=tuple(row["within"] or ()),
        mode=Mode(row["mode"]),
    )
    return Record(
        request=request,
        place=row["place"],
        asked_at=row["asked_at"],
        deadline=row["deadline"],
        token=row["token"],
        owner=row["owner"],
        attempts=row["attempts"],
        overlaps=row["beside"],
        started_at=row["started_at"],
        is_atomic=row["atomic"],
        ended_at=ended_at,
        reply=reply,
    )


def reply_of(id: str, outcome: str, answer: bytes, cause: str, token: int) -> Reply:
    return Reply(id=id, outcome=Ending(outcome), body=answer, cause=cause, token=token)


def circle_cause_of(path: str) -> str:
    """Of the names of functions, and their keys, as the server tells them."""
    spots = [(name, decoded(bytes.fromhex(key))) for name, key in msgspec.json.decode(path, type=list[tuple[str, str]])]
    return rules.circle_cause(spots)


def switch_of_row(row: Any) -> Switch:
    return Switch(
        keys=decoded(row["keys"]),
        mode=Mode(row["mode"]),
        is_pattern=row["is_pattern"],
        observe_until=row["observe_until"],
        at=row["at"],
        by=row["by"],
    )


def storable(text: str) -> str:
    """The server refuses this one character in a text."""
    return text.replace("\0", "\ufffd")


def encoded(text: str) -> bytes:
    """Keys and ids: any text, in the order of its characters."""
    return text.encode()


def decoded(code: bytes) -> str:
    return code.decode()


_INT_MAX = 2**31 - 1
_REGISTER = "insert into keywise_functions (name) values ($1) on conflict (name) do nothing"
_NUMBER = "select id from keywise_functions where name = $1"
_SWITCHES = (
    "select f.switches, s.* from keywise_functions as f left join keywise_turn_switches as s on s.function = f.id "
    "where f.id = $1"
)
_STEP = "select * from keywise_turn_step_1($1, $2, $3, $4)"
_LOCKED_STEP = "select * from keywise_turn_locked_step_1($1, $2, $3, $4)"
_LOCKED_RENEW = "select * from keywise_turn_locked_renew_1($1, $2, $3, $4)"
_LOCKED_BACK = "select keywise_turn_locked_back_1($1, $2, $3, $4)"
_BACK = "select keywise_turn_back_1($1, $2, $3, $4)"
_UNLOCK = "select keywise_turn_unlock_1($1, $2)"
_RENEW = "select * from keywise_turn_renew_1($1, $2, $3, $4)"
_COUNT = "update keywise_functions set sessions_lost = sessions_lost + $2 where id = $1"
_WITHDRAW = "select * from keywise_turn_withdraw_1($1, $2, $3, $4, $5)"
_REPLIES = (
    "with live as (insert into keywise_turn_owners (function, owner, alive_until) "
    "values ($1, $2, extract(epoch from clock_timestamp())::float8 + $3::float8) "
    "on conflict (function, owner) do update set alive_until = excluded.alive_until) "
    "select wanted.id, last.outcome, last.answer, last.cause, last.answer_token "
    "from unnest($4::bytea[]) as wanted (id) cross join lateral ("
    "select outcome, answer, cause, answer_token from keywise_turn_completed "
    "where function = $1 and id = wanted.id order by place desc limit 1) as last "
    "where not exists (select from keywise_turn_work where function = $1 and id = wanted.id)"
)
