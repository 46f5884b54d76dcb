"""What every backend of turns promises about modes and the operator: nothing runs beside turns, and all is kept."""

from keywise.core.serial.contract import Ending, Mode, Reply, Switch, Turn
from keywise.testing.conformance.promise import Promises, near, same
from keywise.testing.conformance.serial.ordering import (
    CLOCK_S,
    FOREVER,
    OBSERVE,
    OFF,
    ON,
    PLAIN,
    TurnsBench,
    asked,
    done,
    modes,
)

TURN_MODE_PROMISES: Promises[TurnsBench] = Promises()
TURN_OPERATOR_PROMISES: Promises[TurnsBench] = Promises()


async def _observed(bench: TurnsBench, id: str, *, by_w2: bool = False, key: str = "a") -> Turn:
    turns = bench.another if by_w2 else bench.turns
    [turn] = await turns.ask([asked(id, key, mode=OBSERVE, runner="w2" if by_w2 else "w1")])
    if not isinstance(turn, Turn):
        raise AssertionError(f"a request to an observed key got {turn} instead of a turn")
    return turn


async def _switch(bench: TurnsBench, keys: str, mode: Mode, *, is_pattern: bool = False, until_s: float = 0.0) -> None:
    now = await bench.turns.operator.now()
    switch = Switch(keys=keys, mode=mode, is_pattern=is_pattern, observe_until=now + until_s, at=now, by="ann")
    await bench.turns.operator.switch(switch)


@TURN_MODE_PROMISES.add(PLAIN)
async def observed_requests_run_at_once_and_overlaps_are_counted(bench: TurnsBench) -> None:
    """Each has a turn when it is asked for, and knows how many others of its key ran then."""
    first = await _observed(bench, "1")
    second = await _observed(bench, "2", by_w2=True)
    other = await _observed(bench, "3", key="b")
    same("the overlaps", [first.overlaps, second.overlaps, other.overlaps], [0, 1, 0])
    await bench.end(first, other)
    await bench.end(second, by=bench.another)
    same("the overlaps later", (await _observed(bench, "4")).overlaps, 0)
    same("the overlaps that are kept", [(await bench.record(id)).overlaps for id in "123"], [0, 1, 0])
    [answer] = await bench.turns.ask([asked("1", mode=OBSERVE, runner="w1")])
    same("the answer to the same id", answer, done(first))


@TURN_MODE_PROMISES.add(PLAIN)
async def an_observed_request_never_runs_beside_one_in_turn(bench: TurnsBench) -> None:
    """Requests in turn wait until those that were observed have ended, and the other way round."""
    first = await _observed(bench, "1")
    await bench.ask("2")
    same("turns beside an observed request", await bench.take(), {})
    told = await bench.another.ask([asked("3", mode=OBSERVE)])
    same("what is said to an observed one while others wait", modes(told), ["switched on"])
    await bench.end(first)
    turn = await bench.one("2")
    told = await bench.another.ask([asked("3", mode=OBSERVE)])
    same("what is said to an observed one while another runs", modes(told), ["switched on"])
    await bench.end(turn)
    await _observed(bench, "3")


@TURN_MODE_PROMISES.add(PLAIN)
async def a_lost_owner_holds_up_no_key_that_was_observed(bench: TurnsBench) -> None:
    """What it observed is lost, and the key goes on in turn; its late answer is refused."""
    first = await _observed(bench, "1")
    await bench.ask("2", turns=bench.another)
    same("lost tokens", await bench.turns.renew([first.token]), [])
    bench.lose()
    turn = await bench.one("2", turns=bench.another)
    same("the outcome", await bench.outcome("1"), Ending.LOST)
    same("the refused answers", (await bench.turns.answer([done(first)])).refused, ["1"])
    same("lost tokens after the loss", await bench.turns.renew([first.token]), [first.token])
    await bench.end(turn, by=bench.another)


@TURN_MODE_PROMISES.add(PLAIN)
async def what_a_lost_owner_observed_ends_though_nobody_waits_for_its_key(bench: TurnsBench) -> None:
    """Whoever asks for its id is told that it is lost, and it is pruned like others."""
    await _observed(bench, "1")
    await bench.another.take(1)
    same("the outcome while its owner lives", await bench.outcome("1"), None)
    bench.lose()
    same("turns", await bench.another.take(1), [])
    [told] = await bench.another.ask([asked("1", runner="w2", mode=OBSERVE)])
    same("what is said to the same id", told.outcome if isinstance(told, Reply) else told, Ending.LOST)
    same("what runs", await bench.another.operator.states(10), [])
    bench.advance(100.0)
    same("the pruned requests", await bench.another.operator.prune(50.0), 1)


@TURN_MODE_PROMISES.add(PLAIN)
async def a_caller_with_an_old_view_is_told_the_mode(bench: TurnsBench) -> None:
    """The store knows the switches: who takes the mode for another one is told, and nothing of the request is kept."""
    for mode in (OBSERVE, OFF, ON):
        await _switch(bench, "a", mode)
        for wrong in {OBSERVE, ON} - {mode}:
            told = await bench.another.ask([asked("1", mode=wrong)])
            same("what is said", modes(told), [f"switched {mode.value}"])
    same("what is kept", await bench.turns.operator.record("1"), None)
    await bench.ask("1")


@TURN_MODE_PROMISES.add(PLAIN)
async def the_switch_for_a_key_goes_before_patterns(bench: TurnsBench) -> None:
    """Of patterns the newest counts; who has no switch is in the mode that the caller says."""
    await _switch(bench, "a", ON)
    bench.advance(1.0)
    await _switch(bench, "*", OFF, is_pattern=True)
    bench.advance(1.0)
    await _switch(bench, "b*", OBSERVE, is_pattern=True)
    told = await bench.turns.ask([asked(key, key) for key in ("a", "b1", "c", "b")])
    same("what is said", modes(told), ["waits", "switched observe", "switched off", "switched observe"])
    switches = await bench.another.operator.switches()
    seen = sorted((switch.keys, switch.is_pattern, switch.mode, switch.by) for switch in switches)
    same("the switches", seen, [("*", True, OFF, "ann"), ("a", False, ON, "ann"), ("b*", True, OBSERVE, "ann")])
    await bench.another.operator.switch(None, "*", True)
    same("what is said without the pattern", modes(await bench.turns.ask([asked("c", "c")])), ["waits"])


@TURN_MODE_PROMISES.add(PLAIN)
async def a_key_that_is_switched_on_is_observed_for_a_while(bench: TurnsBench) -> None:
    """As long as somebody may still run it without the store: only then requests are run in turn."""
    await _switch(bench, "a", ON, until_s=50.0)
    same("what is said at first", modes(await bench.turns.ask([asked("1")])), ["switched observe"])
    first = await _observed(bench, "1")
    bench.advance(55.0)
    same("what is said after it", modes(await bench.turns.ask([asked("2", mode=OBSERVE)])), ["switched on"])
    await bench.ask("2")
    same("turns beside the observed one", await bench.take(), {})
    await bench.end(first)
    await bench.one("2")


@TURN_MODE_PROMISES.add(PLAIN)
async def a_switch_that_was_set_meanwhile_costs_no_turn(bench: TurnsBench) -> None:
    """Whoever asks, from within a turn too, and takes in the same step, knows of all turns that it has."""
    await bench.ask("outer", key="outer", runner="w1")
    outer = await bench.one("outer")
    for number, within in enumerate([(), (outer.token,)]):
        await bench.ask(f"1 {number}", key=f"a {number}", runner="w1")
        now = await bench.another.operator.now()
        await bench.another.operator.switch(Switch(keys=f"another {number}", mode=ON, at=now))
        request = asked(f"2 {number}", f"b {number}", runner="w1", within=within)
        answered = await bench.turns.answer([], 5, 1, [request])
        same("the answers", answered.answers, [None])
        same("the turns", [turn.request.id for turn in answered.turns], [f"1 {number}", f"2 {number}"])


# The operator.


@TURN_OPERATOR_PROMISES.add(PLAIN)
async def the_history_tells_who_asked_when_it_ran_and_what_came_of_it(bench: TurnsBench) -> None:
    """What is kept of a request: all of it, its place, its times by the store's clock, its owner and its reply."""
    begin = await bench.turns.operator.now()
    await bench.ask("1", "2", wait_s=500.0)
    bench.advance(10.0)
    turn = await bench.one("1", turns=bench.another)
    bench.advance(20.0)
    await bench.end(turn, by=bench.another)
    record, waiting = await bench.record("1"), await bench.record("2")
    same("the request", record.request.asked_by, "somebody")
    same("the place, owner and attempts", (record.place, record.owner, record.attempts), (1, "w2", 1))
    same("the reply", record.reply, done(turn))
    for what, seen, after_s in (
        ("asked", record.asked_at, 0.0),
        ("begun", record.started_at, 10.0),
        ("ended", record.ended_at, 30.0),
        ("over", record.deadline, 500.0),
    ):
        near(f"when it was {what}", seen, begin + after_s, within=CLOCK_S)
    same("what waits", (waiting.place, waiting.reply, waiting.started_at, waiting.token), (2, None, 0.0, 0))
    same("what is not known", await bench.turns.operator.record("3"), None)


@TURN_OPERATOR_PROMISES.add(PLAIN)
async def the_history_has_the_newest_first(bench: TurnsBench) -> None:
    """Of one key or of all, as many as asked for; an expired request that was asked for again is there twice."""
    for id, key in (("1", "a"), ("2", "b"), ("3", "a")):
        await bench.ask(id, key=key, wait_s=10.0)
        bench.advance(1.0)
    bench.advance(20.0)
    await bench.take()
    await bench.ask("1", wait_s=FOREVER)

    async def seen(key: str | None, limit: int) -> list[str]:
        return [record.request.id for record in await bench.another.operator.history(key, limit)]

    same("all", await seen(None, 10), ["1", "3", "2", "1"])
    same("those of a key", await seen("a", 10), ["1", "3", "1"])
    same("the newest two", await seen(None, 2), ["1", "3"])
    same("those of a key that nobody asked for", await seen("c", 10), [])


@TURN_OPERATOR_PROMISES.add(PLAIN)
async def what_ended_long_ago_is_pruned(bench: TurnsBench) -> None:
    """Only what has ended, and only after the retention; places go on from where they were."""
    await bench.ask("old", "runs", "waits", wait_s=FOREVER)
    await bench.end(await bench.one("old"))
    turn = await bench.one("runs")
    bench.advance(1000.0)
    await bench.turns.renew([turn.token])
    await bench.ask("young", key="b")
    await bench.end(await bench.one("young"))
    same("what was pruned", await bench.turns.operator.prune(500.0), 1)
    same("what was pruned again", await bench.another.operator.prune(500.0), 0)
    left = {record.request.id for record in await bench.turns.operator.history(None, 10)}
    same("what is left", left, {"runs", "waits", "young"})
    await bench.end(turn)
    await bench.ask("old")
    same("the place of a forgotten id", (await bench.record("old")).place, 4)


@TURN_OPERATOR_PROMISES.add(PLAIN)
async def the_states_tell_what_goes_on(bench: TurnsBench) -> None:
    """Keys with requests that wait or run, the longest line first, with their holder."""
    begin = await bench.turns.operator.now()
    await bench.ask("1", "2", "3")
    await bench.ask("4", key="b")
    await bench.ask("5", key="c")
    run = await bench.take()
    await bench.end(run["5"])
    await bench.turns.ask([asked("6", "d", mode=OBSERVE, runner="w1")])
    states = await bench.another.operator.states(10)
    seen = [(state.key, state.waiting, state.running, state.owner) for state in states]
    same("the states", seen, [("a", 2, 1, "w1"), ("b", 0, 1, "w1"), ("d", 0, 1, "")])
    near("since when", states[0].since, begin, within=CLOCK_S)
    same("the number of states", len(await bench.turns.operator.states(1)), 1)


@TURN_OPERATOR_PROMISES.add(PLAIN)
async def an_end_by_the_operator_is_kept(bench: TurnsBench) -> None:
    """A request that was cancelled stays in the history, and its id is not run."""
    await bench.ask("1")
    await bench.turns.withdraw(["1"], Ending.CANCELLED, "ann: wrong market")
    record = await bench.record("1")
    same("the reply", record.reply, Reply(id="1", outcome=Ending.CANCELLED, cause="ann: wrong market"))
    same("turns", await bench.take(), {})
