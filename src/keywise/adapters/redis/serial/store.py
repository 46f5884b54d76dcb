"""The requests of one serial function in a Redis server, as one owner sees them: one call of a script for each step.

Redis may lose what it has answered for. Each owner remembers the number of its last call, and says it with the next:
a server that knows a lower one has lost something. Then no turns are given for a lease, since others may still run.
"""

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
from redis.exceptions import OutOfMemoryError

from keywise.adapters.redis.database import RedisDatabase
from keywise.adapters.redis.script import Script
from keywise.adapters.redis.serial.lua import prefix_of
from keywise.adapters.redis.serial.scripts import (
    EXCHANGE,
    EXCHANGE_FREEING,
    GIVE_BACK,
    OPEN,
    RENEW,
    REPLIES,
    SWITCHES,
    WITHDRAW,
)
from keywise.core.errors import DatabaseError, UnavailableError
from keywise.core.serial import rules
from keywise.core.serial.contract import Answered, Ending, Mode, Record, Reply, Request, Switch, Turn, TurnPolicy

FORMAT = "1"
TRIES = 10
"""How often a call is made again at once that met a switch that was set, or found that something was lost."""
OWNERS_MAX = 4096
"""Of so many the numbers are kept, those that called last; of the others only the highest."""
NONCE_BITS = 11
"""Random ones behind the number of each token, so that none is given again after everything was lost."""


class RedisTurnsStore:
    """The scripts of turns, for one serial function and one owner."""

    def __init__(self, database: RedisDatabase, function: str, owner: str, policy: TurnPolicy) -> None:
        self.database = database
        self.name = function
        self.owner = owner
        self.prefix = prefix_of(function)
        self.losses = 0
        """How often this owner has found that something was lost."""
        self._policy = policy
        self._nonce = ""
        self._own = 0
        self._switches: list[Switch] = []
        self._version = 0
        """Of the switches, as the store counts their changes."""

    async def open(self) -> None:
        """Look at what is there, or begin."""
        self._own = 0
        await self._learn("")
        await self.read_switches()

    async def exchange(
        self, replies: Sequence[Reply], limit: int = 0, run_max: int = 1, requests: Sequence[Request] = ()
    ) -> Answered:
        """Answer, ask and take. Where the server takes in nothing new, what has begun is answered all the same."""
        try:
            return await self._exchange(EXCHANGE if requests else EXCHANGE_FREEING, replies, (limit, run_max), requests)
        except UnavailableError as error:
            if replies and isinstance(error.__cause__, OutOfMemoryError):
                await self._exchange(EXCHANGE_FREEING, replies)
            raise

    async def _exchange(
        self,
        script: Script,
        replies: Sequence[Reply],
        taking: tuple[int, int] = (0, 1),
        requests: Sequence[Request] = (),
    ) -> Answered:
        given = [(one.id, one.outcome.value, _raw(one.body), one.cause, token_text(one.token)) for one in replies]
        for _ in range(TRIES):
            asked = [self._request(one) for one in requests]
            found = await self._call(script, (given, asked, self._version, *taking))
            if found != [b"switches"]:
                refused, answers, turns = found
                return Answered(
                    [id.decode() for id in refused],
                    [turn_of(fields) for fields in turns],
                    [_answer(*pair) for pair in zip(requests, answers, strict=True)],
                )
            await self.read_switches()
        raise UnavailableError(f"{self.database.name}: somebody sets switches all the time")

    async def give_back(self, turns: Sequence[Turn]) -> None:
        await self._call(GIVE_BACK, [(turn.request.id, token_text(turn.token)) for turn in turns])

    async def renew(self, tokens: Sequence[int], before: float | None) -> list[int]:
        [lost] = await self._call(RENEW, ([token_text(token) for token in tokens], before or False))
        return [tokens[at] for at in lost]

    async def withdraw(self, ids: Sequence[str], outcome: Ending, cause: str) -> list[str]:
        [ended] = await self._call(WITHDRAW, (ids, outcome.value, cause))
        return [id.decode() for id in ended]

    async def replies(self, ids: Sequence[str]) -> dict[str, Reply]:
        [found] = await self._call(REPLIES, ids)
        return {id: reply_of(id, *told[1:]) for id, told in zip(ids, found, strict=True) if told is not None}

    async def read_switches(self) -> list[Switch]:
        version, packed = await self.database.call(SWITCHES, self.prefix)
        self._version = int(version)
        self._switches = [_SWITCH(one) for one in packed]
        return self._switches

    async def _call(self, script: Script, given: Any) -> list[Any]:
        """The answer of an owner's script. What was lost is noted, and the call is made again."""
        policy = self._policy
        for _ in range(TRIES):
            terms = (
                *(self.prefix, self._nonce, self.owner, self._own, policy.lease_s),
                *(policy.atomic, policy.attempts_max, str(secrets.randbits(NONCE_BITS)), self.name),
            )
            answer = await self.database.call(script, _PACK(terms), _PACK(given))
            if answer[0] == b"done":
                self._own = max(self._own, answer[1])
                return answer[2:]
            if answer != [b"lost"]:
                return answer
            self.losses += 1
            await self._learn(self._nonce)
            await self.read_switches()
        raise UnavailableError(f"{self.database.name} keeps losing what it was told")

    async def _learn(self, lost: str) -> None:
        """Come to know what is there; with the name that it had before, that something was lost is noted."""
        given = (self.owner, secrets.token_hex(8), FORMAT, lost, self._own, repr(self._policy.lease_s), OWNERS_MAX)
        form, nonce, seq = await self.database.call(OPEN, self.prefix, *given)
        if form != FORMAT.encode():
            raise DatabaseError(
                f"{self.database.name} was written by a newer keywise: the format of the serial function "
                f"{self.name!r} is {(form or b'?').decode()}, this one knows {FORMAT}; upgrade keywise"
            )
        self._nonce = nonce.decode()
        self._own = int(seq) if lost else 0

    def _request(self, request: Request) -> tuple[Any, ...]:
        switch = rules.switch_of(request.key, self._switches) if self._switches else None
        return (
            *(request.id, request.key, _raw(request.body), request.runner, request.mode.value),
            *(_raw(_PACK((request.asked_by, request.wait_s, request.within))), request.wait_s),
            " ".join(filter(None, map(token_text, request.within))),
            *((switch.mode.value, switch.observe_until) if switch is not None else (False, 0.0)),
        )


def token_text(token: int) -> str:
    """A token as the scripts know it: no number, since Lua would lose digits of it."""
    return f"{token >> NONCE_BITS}:{token & (1 << NONCE_BITS) - 1}" if token else ""


def token_of(text: bytes) -> int:
    number, _, nonce = text.partition(b":")
    return int(number) << NONCE_BITS | int(nonce) if text else 0


def turn_of(fields: Sequence[Any]) -> Turn:
    record = record_of(fields)
    return rules.turn_of(record, record.started_at)


def record_of(fields: Sequence[Any]) -> Record:
    """What is kept of a request, from its fields in their order."""
    id, key, body, runner, mode, more, place, asked, deadline = fields[:9]
    token, owner, attempts, overlaps, started, atomic, ended, *told = fields[9:]
    asked_by, wait_s, within = _MORE(more)
    request = Request(
        id=id.decode(),
        key=key.decode(),
        body=body,
        asked_by=asked_by,
        runner=runner.decode(),
        wait_s=wait_s,
        within=within,
        mode=Mode(mode.decode()),
    )
    return Record(
        request=request,
        place=int(place),
        asked_at=float(asked),
        deadline=float(deadline),
        token=token_of(token),
        owner=owner.decode(),
        attempts=int(attempts),
        overlaps=int(overlaps),
        started_at=float(started),
        is_atomic=atomic == b"1",
        ended_at=float(ended or 0.0),
        reply=reply_of(request.id, *told) if ended else None,
    )


def reply_of(id: str, outcome: bytes, body: bytes, cause: bytes, token: bytes) -> Reply:
    return Reply(id=id, outcome=Ending(outcome.decode()), body=body, cause=cause.decode(), token=token_of(token))


def _answer(request: Request, told: list[Any] | None) -> Reply | Turn | None:
    """What was said to a request."""
    if told is None:
        return None
    match told[0]:
        case b"turn":
            return turn_of(told[1])
        case b"clash":
            return rules.clash(request, told[1].decode())
        case b"switched":
            return rules.switched(request, Mode(told[1].decode()))
        case b"circle":
            names = [name.decode() for name in told[1]]
            return rules.refusal(request, rules.circle_cause(list(zip(names[::2], names[1::2], strict=True))))
    return reply_of(request.id, *told[1:])


def _raw(data: bytes) -> msgspec.Raw:
    """Bytes, packed as a text is: the scripts know no other kind of them."""
    return msgspec.Raw(b"\xdb" + len(data).to_bytes(4, "big") + data)


_PACK = msgspec.msgpack.Encoder().encode
_SWITCH = msgspec.msgpack.Decoder(Switch).decode
_MORE = msgspec.msgpack.Decoder(tuple[str, float, tuple[int, ...]]).decode
