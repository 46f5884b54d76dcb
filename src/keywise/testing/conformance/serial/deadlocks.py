"""What every backend of turns promises about requests that would wait for themselves."""

from collections.abc import Sequence
from typing import Any

from keywise.core.serial.contract import Ending, Reply, Turn
from keywise.testing.conformance.promise import Promises, same
from keywise.testing.conformance.serial.ordering import OBSERVE, PLAIN, TurnsBench, asked

TURN_CIRCLE_PROMISES: Promises[TurnsBench] = Promises()


async def _refused(bench: TurnsBench, turns: Any, key: str, within: tuple[int, ...], *names: str) -> None:
    [answer] = await turns.ask([asked(f"{key} within {within}", key, within=within)])
    if not isinstance(answer, Reply) or answer.outcome is not Ending.REFUSED:
        raise AssertionError(f"the answer to a request that waits for itself was {answer}")
    for name in names:
        if repr(name) not in answer.cause:
            raise AssertionError(f"the cause does not name {name!r}: {answer.cause}")


async def _turn(bench: TurnsBench, key: str, turns: Any = None, within: tuple[int, ...] = ()) -> Turn:
    await bench.ask(f"of {key}", key=key, turns=turns, within=within)
    return await bench.one(f"of {key}", turns=turns)


@TURN_CIRCLE_PROMISES.add(PLAIN)
async def who_holds_a_key_cannot_wait_for_it(bench: TurnsBench) -> None:
    """A request from within a turn of the same key would wait for ever: it is refused, with the key."""
    outer = await _turn(bench, "a")
    inner = await _turn(bench, "b", within=(outer.token,))
    await _refused(bench, bench.turns, "a", (outer.token,), "a")
    await _refused(bench, bench.turns, "a", (outer.token, inner.token), "a")
    await bench.end(inner)
    await bench.end(outer)
    await bench.ask("later", within=(outer.token,))


@TURN_CIRCLE_PROMISES.add(PLAIN)
async def a_circle_over_keys_is_refused(bench: TurnsBench) -> None:
    """Two that hold a key each and would wait for the other's: the second one is refused, with both keys."""
    first = await _turn(bench, "a")
    second = await _turn(bench, "b", bench.another)
    third = await _turn(bench, "c")
    await bench.ask("a waits for b", key="b", within=(first.token,))
    await bench.ask("b waits for c", key="c", within=(second.token,), turns=bench.another)
    await _refused(bench, bench.turns, "a", (third.token,), "a", "b", "c")
    await bench.end(third)
    nested = await bench.one("b waits for c", turns=bench.another)
    await _refused(bench, bench.another, "a", (second.token, nested.token), "a", "b")
    await bench.end(nested, second, by=bench.another)
    await bench.one("a waits for b")


@TURN_CIRCLE_PROMISES.add(PLAIN)
async def a_circle_over_functions_is_refused(bench: TurnsBench) -> None:
    """Keys of different functions in one store make circles too."""
    first = await _turn(bench, "a")
    second = await _turn(bench, "b", bench.beside)
    await bench.ask("waits", key="b", within=(first.token,), turns=bench.beside)
    await _refused(bench, bench.turns, "a", (second.token,), "a", "b")


@TURN_CIRCLE_PROMISES.add(PLAIN)
async def who_joins_an_id_cannot_wait_for_itself_either(bench: TurnsBench) -> None:
    """An id that waits or runs is waited for as a new one is: a circle over it is refused, with the keys."""
    first, second = await _turn(bench, "a"), await _turn(bench, "b", bench.another)
    [own] = await bench.turns.ask([asked("of a", "a", within=(first.token,))])
    same("the answer to the own id", _outcomes([own]), [Ending.REFUSED])
    same("what is said to who joins", await bench.turns.ask([asked("of b", "b", within=(first.token,))]), [None])
    await _refused(bench, bench.another, "a", (second.token,), "a", "b")
    await bench.end(second, by=bench.another)
    await bench.ask("a again", key="a", within=(second.token,))
    await bench.ask("waits", key="c", turns=bench.another)
    same("what is said to who waits", await bench.turns.ask([asked("waits", "c", within=(first.token,))]), [None])
    third = await bench.one("waits", turns=bench.another)
    await _refused(bench, bench.another, "a", (third.token,), "a", "c")


@TURN_CIRCLE_PROMISES.add(PLAIN)
async def an_observed_request_cannot_wait_for_itself(bench: TurnsBench) -> None:
    """A request in turn waits for all that are observed on its key, and so it must not come from within one."""
    requests = [asked(id, "a", mode=OBSERVE, runner="w1") for id in ("1", "2")]
    [first, second] = [turn for turn in await bench.turns.ask(requests) if isinstance(turn, Turn)]
    await _refused(bench, bench.turns, "a", (first.token,), "a")
    within = (first.token,)
    [own] = await bench.turns.ask([asked("1", "a", mode=OBSERVE, within=within)])
    same("the answer to the own id", _outcomes([own]), [Ending.REFUSED])
    same("what is said to who joins", await bench.turns.ask([asked("2", "a", mode=OBSERVE, within=within)]), [None])
    [back] = await bench.turns.ask([asked("1", "a", mode=OBSERVE, within=(second.token,))])
    same("the answer to who comes back", _outcomes([back]), [Ending.REFUSED])
    holder = await _turn(bench, "b")
    await bench.turns.ask([asked("4", "a", mode=OBSERVE, runner="w1", within=(holder.token,))])
    same("what is said behind one that runs at once", await bench.turns.ask([asked("5", "b", within=within)]), [None])
    await bench.end(first, second)
    await bench.ask("3", within=within)


@TURN_CIRCLE_PROMISES.add(PLAIN)
async def who_only_waits_behind_others_is_not_refused(bench: TurnsBench) -> None:
    """A long chain that ends somewhere is no circle, and neither is a second request from the same turn."""
    first, second = await _turn(bench, "a"), await _turn(bench, "b")
    await bench.ask("1", "2", key="b", within=(first.token,))
    await bench.ask("3", key="c", within=(first.token, second.token))
    await bench.ask("4", key="a")


def _outcomes(answers: Sequence[Reply | Turn | None]) -> list[Ending | None]:
    return [answer.outcome if isinstance(answer, Reply) else None for answer in answers]
