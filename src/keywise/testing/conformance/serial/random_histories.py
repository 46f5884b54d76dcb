"""Random histories: every backend of turns gives the same answers as the one in memory, step by step."""

import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from msgspec.structs import replace

from keywise.adapters.memory.database import MemoryDatabase
from keywise.adapters.memory.serial import MemoryTurns
from keywise.core.serial.contract import Ending, KeyState, Mode, Record, Reply, Request, Switch, Turn, TurnPolicy
from keywise.testing.conformance.promise import Promises, same
from keywise.testing.conformance.serial.ordering import TurnsBench

STEPS = 700
EPOCH = 120
"""After so many steps the ids and keys are new."""
STEP_S = 10.0
"""All times are multiples of it, and all limits lie between two of them: a store's clock may go on in the meantime."""
LEASE_S = 6.5 * STEP_S
PLAIN = TurnPolicy(lease_s=LEASE_S)
ATOMIC = TurnPolicy(lease_s=LEASE_S, atomic=True, attempts_max=2)
KEYS = ("a", "b", "c")
OWNERS = ("w1", "w2")

TURN_HISTORY_PROMISES: Promises[TurnsBench] = Promises()

Call: TypeAlias = Callable[[Any, int], Coroutine[Any, Any, Any]]
"""What is done to one of two stores: the one under test is 0, the one in memory is 1."""


@TURN_HISTORY_PROMISES.add(PLAIN)
async def a_random_history_has_the_answers_of_memory(bench: TurnsBench) -> None:
    """Whatever two owners do, in whatever order, they are told the same as by the backend in memory."""
    await _play(bench, PLAIN)


@TURN_HISTORY_PROMISES.add(ATOMIC)
async def a_random_history_of_atomic_work_has_the_answers_of_memory(bench: TurnsBench) -> None:
    """The same where requests of lost owners are run again."""
    await _play(bench, ATOMIC)


async def _play(bench: TurnsBench, policy: TurnPolicy) -> None:
    history = RandomSerialHistory(bench, policy)
    for _ in range(STEPS):
        await history.step()
    await history.compare_all()


class RandomSerialHistory:
    """One random history, on the store under test and in memory at once."""

    def __init__(self, bench: TurnsBench, policy: TurnPolicy) -> None:
        self._rng = random.Random(f"{policy}")
        self._bench = bench
        self._now = 1000.0
        database = MemoryDatabase(clock=lambda: self._now)
        models = [MemoryTurns(database, bench.function, owner, policy) for owner in OWNERS]
        self._sides = ((bench.turns, models[0]), (bench.another, models[1]))
        self._held: list[list[tuple[Turn, Turn]]] = [[], []]
        """All turns that each owner ever had, as the two stores told them."""
        self._steps: list[str] = []

    async def step(self) -> None:
        # Two calls are never at the same moment, as in the store under test.
        self._now += 0.001
        acts = (self._ask, self._take, self._answer, self._others)
        await self._rng.choices(acts, (4, 4, 4, 3))[0](self._rng.randrange(2))

    async def compare_all(self) -> None:
        await self._both(0, "history", lambda turns, _: turns.operator.history(None, 1000))
        await self._both(1, "history of a key", lambda turns, _: turns.operator.history("h0a", 1000))

    @property
    def _epoch(self) -> int:
        return len(self._steps) // EPOCH

    async def _ask(self, who: int) -> None:
        asked = [self._request(who) for _ in range(self._rng.randint(1, 3))]
        within = self._rng.sample(self._held[who][-3:], self._rng.randint(0, min(2, len(self._held[who][-3:]))))

        async def act(turns: Any, side: int) -> Any:
            tokens = tuple(sorted({pair[side].token for pair in within}))
            return await turns.ask([Request(**one, within=tokens) for one in asked])

        answers = await self._both(who, f"ask {asked} within {len(within)}", act)
        self._keep(who, *([one for one in answer if isinstance(one, Turn)] for answer in answers))

    def _request(self, who: int) -> dict[str, Any]:
        number = self._rng.randint(1, 14)
        return {
            "id": f"h{self._epoch}-{number}",
            "key": f"h{self._epoch}{KEYS[number % len(KEYS)]}",
            "body": b"other" if self._rng.random() < 0.05 else b"body",
            "runner": self._rng.choice(("", OWNERS[who])),
            "wait_s": self._rng.choice((1.5, 2.5, 7.5, 20.5)) * STEP_S,
            "mode": Mode.OBSERVE if self._rng.random() < 0.2 else Mode.ON,
        }

    async def _take(self, who: int) -> None:
        limit, run_max = self._rng.randint(1, 3), self._rng.randint(1, 3)
        taken = await self._both(who, f"take {limit} {run_max}", lambda turns, _: turns.take(limit, run_max))
        self._keep(who, *taken)

    async def _answer(self, who: int) -> None:
        chosen, limit = self._chosen(who), self._rng.randint(0, 2)
        asked = [self._request(who) for _ in range(self._rng.randint(0, 1))]
        outcome, body = self._rng.choice((Ending.DONE, Ending.FAILED)), self._rng.choice((b"1", b"2"))

        async def act(turns: Any, side: int) -> Any:
            pairs = [(pair[side].request.id, pair[side].token) for pair in chosen]
            replies = [Reply(id=id, outcome=outcome, body=body, token=token) for id, token in pairs]
            answered = await turns.answer(replies, limit, 2, [Request(**one) for one in asked])
            turns_now = [one for one in answered.answers if isinstance(one, Turn)]
            return [answered.refused, answered.turns + turns_now, answered.answers]

        answers = await self._both(who, f"answer {_ids(chosen)} and take {limit}", act)
        self._keep(who, *(answer[1] for answer in answers))

    async def _others(self, who: int) -> None:
        chosen, ids = self._chosen(who), [f"h{self._epoch}-{number}" for number in range(1, 15)]
        some = self._rng.sample(ids, 2)
        switch = self._switch()
        acts: tuple[tuple[str, Call], ...] = (
            (f"give back {_ids(chosen)}", lambda turns, side: turns.give_back([pair[side] for pair in chosen])),
            (f"withdraw {some}", lambda turns, _: turns.withdraw(some, Ending.CANCELLED, "so")),
            ("replies", lambda turns, _: turns.replies(ids)),
            ("states", lambda turns, _: turns.operator.states(100)),
            (f"switch {switch}", lambda turns, _: turns.operator.switch(switch)),
            ("no switch", lambda turns, _: turns.operator.switch(None, "*", True)),
            ("prune", lambda turns, _: turns.operator.prune(9.5 * STEP_S)),
        )
        if self._rng.random() < 0.4:
            self._advance()
            return
        if self._rng.random() < 0.3:
            await self._renew(who)
            return
        await self._both(who, *self._rng.choice(acts))

    async def _renew(self, who: int) -> None:
        chosen, ahead_s = self._chosen(who), self._rng.choice((1.0, -0.5 * STEP_S, -2.5 * STEP_S))

        async def act(turns: Any, side: int) -> list[bool]:
            tokens = [pair[side].token for pair in chosen]
            lost = await turns.renew(tokens, await turns.operator.now() + ahead_s)
            return [token in lost for token in tokens]

        await self._both(who, f"renew {_ids(chosen)}", act)

    def _switch(self) -> Switch:
        keys, mode = self._rng.choice(("*", f"h{self._epoch}a")), self._rng.choice(tuple(Mode))
        until = self._now + self._rng.choice((0.0, 2.5)) * STEP_S if mode is Mode.ON else 0.0
        # Only the store in memory has this clock, so that the other one is told how far off the moment is.
        return Switch(keys=keys, mode=mode, is_pattern=keys == "*", at=self._now, observe_until=until)

    def _advance(self) -> None:
        seconds = STEP_S * self._rng.choice((1, 1, 2, 7))
        self._steps.append(f"advance {seconds:g}")
        self._now += seconds
        self._bench.advance(seconds)

    def _chosen(self, who: int) -> list[tuple[Turn, Turn]]:
        recent = self._held[who][-5:]
        chosen = self._rng.sample(recent, self._rng.randint(min(1, len(recent)), min(3, len(recent))))
        return list({pair[0].request.id: pair for pair in chosen}.values())

    def _keep(self, who: int, told: list[Turn], wanted: list[Turn]) -> None:
        self._held[who] += zip(told, wanted, strict=True)

    async def _both(self, who: int, what: str, act: Call) -> tuple[Any, Any]:
        self._steps.append(f"{OWNERS[who]}: {what}")
        told, wanted = [await self._on(turns, side, act) for side, turns in enumerate(self._sides[who])]
        same(f"the answer {self._told()}", _plain(told), _plain(wanted))
        return told, wanted

    async def _on(self, turns: Any, side: int, act: Call) -> Any:
        return await act(turns if side else _Shifted(turns, self._now), side)

    def _told(self) -> str:
        return f"after {'; '.join(self._steps[-6:])}"


class _Shifted:
    """The store under test; moments of switches are told by its own clock."""

    def __init__(self, turns: Any, now: float) -> None:
        self._turns = turns
        self._model_now = now
        self.operator = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._turns, name, None) or getattr(self._turns.operator, name)

    async def switch(self, switch: Switch | None, *keys: Any) -> None:
        if switch is not None:
            off_s = await self._turns.operator.now() - self._model_now
            until = switch.observe_until + off_s if switch.observe_until else 0.0
            switch = replace(switch, at=switch.at + off_s, observe_until=until)
        await self._turns.operator.switch(switch, *keys)


def _ids(pairs: list[tuple[Turn, Turn]]) -> list[str]:
    return [told.request.id for told, _ in pairs]


def _plain(answer: Any) -> Any:
    """Without what differs between two stores: tokens, and times to the second."""
    match answer:
        case Turn():
            return "turn", answer.request.id, answer.place, answer.attempts, answer.overlaps, answer.left_s // STEP_S
        case Reply():
            return "reply", answer.id, answer.outcome, answer.body, answer.cause
        case Record():
            return answer.request.id, answer.place, _plain(answer.reply)
        case KeyState():
            return answer.key, answer.waiting, answer.running, answer.owner
        case list() | tuple():
            return [_plain(one) for one in answer]
        case dict():
            return {name: _plain(one) for name, one in answer.items()}
    return answer
