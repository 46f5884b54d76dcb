"""What every backend of turns promises about asking and taking: one at a time per key, in order, fair between keys."""

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

from keywise.core.serial.contract import Ending, Mode, Record, Reply, Request, Turn, TurnPolicy
from keywise.testing.conformance.promise import Promises, near, same

LEASE_S = 60.0
CLOCK_S = 5.0
"""How far a store's clock may go on by itself during one check."""
PLAIN = TurnPolicy(lease_s=LEASE_S)
ATOMIC = TurnPolicy(lease_s=LEASE_S, atomic=True, attempts_max=2)
KEYS = ["a", " ", "é", "日本語", "🦉", "'; drop table x; --", 'say "hi"', "line\nbreak", "%_\\", "k" * 512, "null", "0"]


@dataclass(slots=True, kw_only=True)
class TurnsBench:
    """The fresh turns of one serial function, opened by two owners."""

    turns: Any
    """A `Turns`; its owner is `w1`."""
    another: Any
    """The same function, opened by `w2` over a connection of its own."""
    beside: Any
    """Another serial function in the same store, opened by `w1`."""
    advance: Callable[[float], None]
    """Let so many seconds pass on the clock of the store."""
    function: str = "function"
    """The name of the function, which causes tell."""

    async def ask(self, *ids: str, key: str = "a", turns: Any = None, **more: Any) -> None:
        """Ask for requests, and be sure that they wait; without a runner of their own, everybody may run them."""
        requests = [asked(id, key, **more) for id in ids]
        same("the answers to new requests", await (turns or self.turns).ask(requests), [None] * len(ids))

    async def take(self, *, turns: Any = None, limit: int = 1000, run_max: int = 1) -> dict[str, Turn]:
        found = await (turns or self.turns).take(limit, run_max)
        return {turn.request.id: turn for turn in found}

    async def one(self, id: str, *, turns: Any = None) -> Turn:
        """Take the turn of one request, and be sure to get that one alone."""
        found = await self.take(turns=turns)
        same("the requests that have a turn now", list(found), [id])
        return found[id]

    async def end(self, *turns: Turn, by: Any = None) -> None:
        """Answer, and be sure that it counts."""
        answered = await (by or self.turns).answer([done(turn) for turn in turns])
        same("the refused answers", answered.refused, [])

    async def record(self, id: str) -> Record:
        record: Record | None = await self.turns.operator.record(id)
        if record is None:
            raise AssertionError(f"nothing is kept of the request {id!r}")
        return record

    async def outcome(self, id: str) -> Ending | None:
        reply = (await self.turns.replies([id])).get(id)
        return None if reply is None else reply.outcome

    def lose(self) -> None:
        """Let all owners be lost that are not heard of again."""
        self.advance(LEASE_S + 1.0)


MakeTurns: TypeAlias = Callable[[TurnPolicy], AbstractAsyncContextManager[TurnsBench]]

TURN_PROMISES: Promises[TurnsBench] = Promises()


def asked(id: str, key: str = "a", **more: Any) -> Request:
    return Request(**{"id": id, "key": key, "body": id.encode(), "asked_by": "somebody", **more})


def done(turn: Turn, body: bytes = b"yes") -> Reply:
    return Reply(id=turn.request.id, outcome=Ending.DONE, body=body, token=turn.token)


@TURN_PROMISES.add(PLAIN)
async def one_request_of_a_key_has_a_turn(bench: TurnsBench) -> None:
    """While a request of a key has its turn, no other one of that key gets one, from whomever."""
    await bench.ask("1", "2", "3")
    turn = await bench.one("1")
    for turns in (bench.turns, bench.another):
        same("what else was given of the key", await bench.take(turns=turns), {})
    await bench.end(turn)
    second = await bench.one("2", turns=bench.another)
    if second.token == turn.token:
        raise AssertionError("two turns of different holders had the same token")


@TURN_PROMISES.add(PLAIN)
async def a_turn_tells_all_of_its_request(bench: TurnsBench) -> None:
    """A turn has its request as it was asked for, its place in the sequence of the key, and the time that is left."""
    [first] = [asked("1", within=(7, 8), wait_s=100.0, body=b"\x00\xff body")]
    await bench.turns.ask([first])
    await bench.ask("2", wait_s=200.0)
    bench.advance(10.0)
    turn = await bench.one("1", turns=bench.another)
    same("the request of the turn", turn.request, first)
    same("the place", turn.place, 1)
    same("the attempts before", turn.attempts, 0)
    near("the time that is left", turn.left_s, 90.0, within=CLOCK_S)
    await bench.end(turn, by=bench.another)
    turn = await bench.one("2")
    same("the place of the second", turn.place, 2)
    await bench.ask("3", key="b")
    same("the place of the first of another key", (await bench.one("3")).place, 1)


@TURN_PROMISES.add(PLAIN)
async def requests_have_their_turns_in_the_order_in_which_they_came(bench: TurnsBench) -> None:
    """First come, first served per key, whoever asked and whoever takes."""
    ids = [f"r{number:03}" for number in range(40)]
    for number, id in enumerate(ids):
        await bench.ask(id, turns=(bench.turns, bench.another)[number % 2])
    seen: list[str] = []
    places: list[int] = []
    for number in range(len(ids)):
        turns = (bench.turns, bench.another)[number % 3 == 0]
        [(id, turn)] = (await bench.take(turns=turns)).items()
        seen.append(id)
        places.append(turn.place)
        await bench.end(turn, by=turns)
    same("the order of the turns", seen, ids)
    same("the places", places, list(range(1, len(ids) + 1)))


@TURN_PROMISES.add(PLAIN)
async def owners_that_take_at_once_never_have_the_same_key(bench: TurnsBench) -> None:
    """Check and take are one step: of two owners that take at the same time, one gets the key."""
    for number in range(15):
        requests = [asked(f"{key}-{number}-{n}", f"k{key}") for key in range(20) for n in range(2)]
        await bench.turns.ask(requests)
        mine, theirs = await asyncio.gather(bench.take(run_max=1), bench.take(turns=bench.another, run_max=1))
        keys = [turn.request.key for turn in (*mine.values(), *theirs.values())]
        same("keys with two holders", len(keys) - len(set(keys)), 0)
        same("the number of keys that have a holder", len(keys), 20)
        await asyncio.gather(bench.end(*mine.values()), bench.end(*theirs.values(), by=bench.another))
        rest = await bench.take()
        same("the number of keys that go on", len(rest), 20)
        await bench.end(*rest.values())


@TURN_PROMISES.add(PLAIN)
async def keys_have_their_turns_in_turn(bench: TurnsBench) -> None:
    """A key with a long line does not hold up others: the key that had no turn for the longest time is the next."""
    await bench.ask(*(f"a{number}" for number in range(5)), key="a")
    bench.advance(1.0)
    await bench.ask("b0", "b1", key="b")
    bench.advance(1.0)
    await bench.ask("c0", key="c")
    seen = []
    for _ in range(6):
        [(id, turn)] = (await bench.take(limit=1)).items()
        seen.append(id)
        await bench.end(turn)
    same("the order of turns over three keys", seen, ["a0", "b0", "c0", "a1", "b1", "a2"])


@TURN_PROMISES.add(PLAIN)
async def a_limit_is_kept(bench: TurnsBench) -> None:
    """No more turns are given than asked for, over keys and in a row."""
    await bench.turns.ask([asked(f"{key}{number}", key, runner="w1") for key in "abc" for number in range(4)])
    same("turns with a limit of 2", len(await bench.take(limit=2)), 2)
    same("turns with a limit of 0", await bench.take(limit=0), {})
    [first, *_] = runs = list((await bench.take(limit=3, run_max=5)).values())
    same("turns with a limit of 3", len(runs), 3)
    same("the keys of a run", {turn.request.key for turn in runs}, {first.request.key})


@TURN_PROMISES.add(PLAIN)
async def an_owner_runs_only_what_it_may(bench: TurnsBench) -> None:
    """A request that only one owner may run waits for that one, and those behind it wait for their order."""
    await bench.ask("mine", runner="w1")
    await bench.ask("theirs", runner="w2", turns=bench.another)
    await bench.ask("anybody's")
    same("turns for the owner behind", await bench.take(turns=bench.another), {})
    await bench.end(await bench.one("mine"))
    same("turns for the owner who is not next", await bench.take(), {})
    await bench.end(await bench.one("theirs", turns=bench.another), by=bench.another)
    await bench.one("anybody's")


@TURN_PROMISES.add(PLAIN)
async def turns_in_a_row_share_a_token(bench: TurnsBench) -> None:
    """Requests of one key that follow each other and are all for one owner can be taken together, under one token."""
    await bench.ask("1", "2", "3", runner="w1")
    await bench.ask("4", runner="w2", turns=bench.another)
    await bench.ask("5", runner="w1")
    run = await bench.take(run_max=2)
    same("the run", list(run), ["1", "2"])
    same("the number of tokens", len({turn.token for turn in run.values()}), 1)
    same("the places", [turn.place for turn in run.values()], [1, 2])
    await bench.end(run["1"])
    same("turns while a part of the run is not answered", await bench.take(run_max=9), {})
    await bench.end(run["2"])
    run = await bench.take(run_max=9)
    same("the run up to the request of another owner", list(run), ["3"])
    await bench.end(*run.values())
    same("turns before the other owner had its own", await bench.take(run_max=9), {})


@TURN_PROMISES.add(PLAIN)
async def an_answer_can_take_the_next_turns(bench: TurnsBench) -> None:
    """Answering and taking are one step, in which nobody else comes between."""
    await bench.ask("1", "2", "3")
    await bench.ask("other", key="b")
    run = await bench.take(run_max=1)
    same("the first turns", sorted(run), ["1", "other"])
    answered = await bench.turns.answer([done(run["1"])], limit=10, run_max=5)
    same("the refused answers", answered.refused, [])
    same("the next turns", [turn.request.id for turn in answered.turns], ["2", "3"])
    same("the reply", await bench.outcome("1"), Ending.DONE)
    same("turns for others", await bench.take(turns=bench.another), {})


@TURN_PROMISES.add(PLAIN)
async def answering_asking_and_taking_are_one_step(bench: TurnsBench) -> None:
    """In this order: what is asked for in the step may have its turn in it, behind what waited before."""
    await bench.ask("1", "2")
    turn = await bench.one("1")
    new = [asked("3"), asked("1"), asked("4", "b")]
    answered = await bench.turns.answer([done(turn)], limit=10, run_max=5, requests=new)
    same("the refused answers", answered.refused, [])
    same("the answers", answered.answers, [None, done(turn), None])
    same("the turns", sorted(one.request.id for one in answered.turns), ["2", "3", "4"])


@TURN_PROMISES.add(PLAIN)
async def the_same_id_waits_once(bench: TurnsBench) -> None:
    """An id that waits or runs already is not put in line again, from whomever it comes."""
    await bench.ask("1")
    await bench.ask("1", turns=bench.another)
    await bench.turns.ask([asked("1"), asked("1")])
    turn = await bench.one("1")
    await bench.ask("1", turns=bench.another)
    await bench.end(turn)
    same("turns after the end", await bench.take(), {})


@TURN_PROMISES.add(PLAIN)
async def the_same_id_asked_for_at_once_waits_once(bench: TurnsBench) -> None:
    """Two owners that ask for the same ids at the same time join: each runs once."""
    for round in range(10):
        requests = [asked(f"{round}-{number}", f"k{number}") for number in range(20)]
        answers = await asyncio.gather(bench.turns.ask(requests), bench.another.ask(requests[::-1]))
        same("the answers", [one for answer in answers for one in answer], [None] * 40)
        turns = await bench.take(run_max=5)
        same("the number of turns", len(turns), 20)
        await bench.end(*turns.values())
        same("the turns after these", await bench.take(), {})


@TURN_PROMISES.add(PLAIN)
async def the_same_id_has_the_same_answer(bench: TurnsBench) -> None:
    """A request that has ended is not run again: whoever asks for its id gets what was stored."""
    await bench.ask("1", "2")
    first = await bench.one("1")
    answer = done(first, b"\x00 the answer \xff")
    await bench.turns.answer([answer])
    second = await bench.one("2")
    failure = Reply(id="2", outcome=Ending.FAILED, cause="ValueError: no 'é'", token=second.token)
    await bench.turns.answer([failure])
    for turns in (bench.turns, bench.another):
        same("the answers", await turns.ask([asked("1"), asked("2")]), [answer, failure])
        same("the replies", await turns.replies(["1", "2", "unknown"]), {"1": answer, "2": failure})
    same("turns", await bench.take(), {})


@TURN_PROMISES.add(PLAIN)
async def an_id_means_one_key_and_one_body(bench: TurnsBench) -> None:
    """The same id with another key or body is refused, and what it says is not kept."""
    await bench.ask("1")
    for wrong in (asked("1", "b"), asked("1", body=b"another")):
        [answer] = await bench.another.ask([wrong])
        if not isinstance(answer, Reply) or answer.outcome is not Ending.REFUSED or "id '1'" not in answer.cause:
            raise AssertionError(f"it was {answer} instead of a refusal that names the id")
    turn = await bench.one("1")
    same("the request that has the turn", turn.request, asked("1"))


@TURN_PROMISES.add(PLAIN)
async def each_request_of_a_call_has_its_own_answer(bench: TurnsBench) -> None:
    """Requests that are asked for together do not hold each other up."""
    await bench.ask("done", "waits")
    await bench.end(await bench.one("done"))
    requests = [asked("new"), asked("waits", body=b"x"), asked("done"), asked("waits"), asked("newer", "b")]
    answers = await bench.turns.ask(requests)
    kinds = [answer and answer.outcome for answer in answers]
    same("the answers", kinds, [None, Ending.REFUSED, Ending.DONE, None, None])
    same("the next turns", sorted(await bench.take()), ["newer", "waits"])


@TURN_PROMISES.add(PLAIN)
async def a_thousand_requests_fit_into_one_call(bench: TurnsBench) -> None:
    """Asking, taking, renewing and answering take many at once."""
    requests = [asked(f"r{number}", f"k{number % 100}", body=b"x" * 1000) for number in range(1000)]
    same("the answers", await bench.turns.ask(requests), [None] * 1000)
    turns = await bench.turns.take(1000, 10)
    same("the number of turns", len(turns), 1000)
    same("lost tokens", await bench.turns.renew([turn.token for turn in turns]), [])
    answered = await bench.turns.answer([done(turn, b"y" * 1000) for turn in turns], limit=1000, run_max=10)
    same("the refused answers", answered.refused, [])
    same("the number of replies", len(await bench.another.replies([one.id for one in requests])), 1000)


@TURN_PROMISES.add(PLAIN)
async def keys_and_ids_are_any_text(bench: TurnsBench) -> None:
    """Keys and ids are text; two that differ are different, and come back as they were."""
    requests = [asked(f"id of {key}", key, asked_by=key) for key in KEYS]
    await bench.turns.ask(requests)
    turns = await bench.take(turns=bench.another)
    same(
        "the requests", sorted((turn.request for turn in turns.values()), key=lambda one: KEYS.index(one.key)), requests
    )
    await bench.end(*turns.values(), by=bench.another)
    ids = sorted(one.id for one in requests)
    same("the replies", sorted(await bench.turns.replies(ids)), ids)


@TURN_PROMISES.add(PLAIN)
async def tokens_grow_and_are_never_given_twice(bench: TurnsBench) -> None:
    """Whoever writes with a token can refuse a lower one."""
    tokens = []
    for number in range(20):
        turns = (bench.turns, bench.another)[number % 2]
        await bench.ask(f"r{number}", turns=turns)
        turn = await bench.one(f"r{number}", turns=turns)
        tokens.append(turn.token)
        await bench.end(turn, by=turns)
    if not all(before < after for before, after in pairwise(tokens)):
        raise AssertionError(f"the tokens of one key were {tokens}")


@TURN_PROMISES.add(PLAIN)
async def functions_do_not_see_each_other(bench: TurnsBench) -> None:
    """The same id and key in another serial function are another request."""
    await bench.ask("1")
    await bench.ask("1", turns=bench.beside)
    turn, other = await bench.one("1"), await bench.one("1", turns=bench.beside)
    await bench.end(turn)
    same("the reply of the other function", await bench.beside.replies(["1"]), {})
    await bench.end(other, by=bench.beside)


@TURN_PROMISES.add(PLAIN)
async def who_waits_is_woken(bench: TurnsBench) -> None:
    """Waiting ends when a request comes, when a key is free and when a reply is there, long before its limit."""

    async def woken(act: Callable[[], Any], turns: Any) -> None:
        await _silence(turns)
        loop = asyncio.get_running_loop()
        waiting = asyncio.ensure_future(turns.wait(30.0))
        await asyncio.sleep(0)
        began = loop.time()
        await act()
        await waiting
        if loop.time() - began > CLOCK_S:
            raise AssertionError(f"it took {loop.time() - began:.1f} s")

    await woken(lambda: bench.ask("1", "2"), bench.another)
    turn = await bench.one("1", turns=bench.another)
    await woken(lambda: bench.end(turn, by=bench.another), bench.turns)
    await bench.one("2")
    await bench.ask("3", runner="w2", turns=bench.another)
    await woken(lambda: bench.turns.withdraw(["3"], Ending.CANCELLED), bench.another)


async def _silence(turns: Any) -> None:
    """What happened before is no news."""
    for _ in range(3):
        await turns.take(0)
        await turns.wait(0.01)


@TURN_PROMISES.add(PLAIN)
async def waiting_has_a_limit(bench: TurnsBench) -> None:
    """Whoever waits for nothing is back in time."""
    await _silence(bench.turns)
    began = asyncio.get_running_loop().time()
    await bench.turns.wait(0.05)
    near("the time of waiting", asyncio.get_running_loop().time() - began, 0.05, within=CLOCK_S)


def modes(answers: Sequence[Reply | Turn | None]) -> list[str]:
    """What was said to requests: a reply's outcome, that they run at once, or that they wait."""
    told = {type(None): "waits", Turn: "runs"}
    return [told.get(type(one)) or f"{one.outcome} {one.cause}".strip() for one in answers]  # type: ignore[union-attr]


FOREVER = math.inf
OBSERVE, ON, OFF = Mode.OBSERVE, Mode.ON, Mode.OFF
