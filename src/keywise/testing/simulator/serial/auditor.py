"""Watches a simulated merge queue, and says which promise was broken."""

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from keywise.core import errors
from keywise.core.entry import Claim
from keywise.core.serial.contract import Ending, Mode, TurnPolicy
from keywise.core.serial.rules import circle
from keywise.core.sink import Grade
from keywise.serial.pending import NOT_ASKED, NOT_ASKED_ANY_MORE
from keywise.testing.run_log import RunLog
from keywise.testing.virtual_loop import Process

if TYPE_CHECKING:
    from keywise.testing.simulator.serial.world import Ask, SerialWorld

LATE_S = 0.01


class Active(msgspec.Struct):
    """A function that runs now."""

    process: Any
    id: str
    token: int
    mode: Mode


class SerialAuditor(RunLog):
    """What was seen from outside: what began, what was accepted, and what callers were told."""

    def __init__(self, world: "SerialWorld") -> None:
        super().__init__(world.now)
        self.accepted: dict[str, list[str]] = {}
        """Of the plain grade: ids by key, in the order in which their writes were accepted."""
        self.excused_until = 0.0
        """By the loop's clock: a jump of the store's clock makes it take processes for lost that are not."""
        self._world = world
        self._active: dict[str, list[Active]] = {}
        self._begun: dict[str, set[int]] = {}
        self._begun_by: dict[tuple[Process, str], float] = {}
        self._returned: dict[str, list[Any]] = {}
        self._raised: set[str] = set()
        self._unknown: set[str] = set()
        self._unknown_to_it: dict[str, list[int]] = {}
        """Tokens under which the function said itself that it does not know what it has done."""
        self._replies: dict[tuple[str, int], Any] = {}
        self._fences: dict[str, int] = {}
        self._last_place: dict[str, int] = {}
        self._told: dict[str, Any] = {}
        self._paused_at: dict[Process, float] = {}

    def paused(self, process: Process) -> None:
        self._paused_at[process] = float("inf")

    def resumed(self, process: Process) -> None:
        self._paused_at[process] = self._world.now()

    # The function.

    def begins(self, process: Process, claim: Claim, id: str) -> None:
        world, key = self._world, claim.key
        record = world.record(id)
        self.note(f"{process.name} begins {id} of {key} with {claim.token}")
        if record is None:
            return self.violate(f"{id} runs, and the store does not know it")
        mode = record.request.mode
        is_again = claim.token in self._begun.setdefault(id, set())
        if self._begun[id] and not is_again and world.grade is Grade.PLAIN:
            self.violate(f"{id} is run twice")
        if id in self._unknown and world.grade is Grade.PLAIN:
            self.violate(f"{id} is tried again, and nobody knows what the last try did")
        unknown = self._unknown_to_it.get(id, [])
        if claim.token in unknown or len(unknown) >= TurnPolicy().attempts_max:
            self.violate(f"{id} is run again, and it does not know what it did under {unknown}")
        self._begun[id].add(claim.token)
        self._begun_by[process, id] = self._world.now()
        if not is_again and not world.waits(process, id):
            self.violate(f"{id} runs, and nobody waits for it any more")
        if not is_again and world.deadline(process, id) <= world.loop.time():
            self.violate(f"{id} runs after its deadline")
        if mode is Mode.ON:
            self._check_turn(claim, id, record.place, is_again)
        for other in self._active.get(key, []):
            is_beside = not (mode is Mode.OBSERVE and other.mode is Mode.OBSERVE) and not self._is_gone(other)
            if is_beside and other.id != id:
                self.violate(f"{id} ({mode}) runs beside {other.id} ({other.mode}) of the same key")
        self._active.setdefault(key, []).append(Active(process, id, claim.token, mode))

    def _check_turn(self, claim: Claim, id: str, place: int, is_again: bool) -> None:
        hold = self._world.lines.holds.get(claim.key)
        if (hold is None or hold.token != claim.token) and not is_again:
            # It may not know yet: after a jump of the store's clock, leases were over too early.
            if not self._is_excused():
                self.violate(f"{id} begins without holding its key")
            return
        if place <= self._last_place.get(claim.key, 0) and not is_again and len(self._begun[id]) == 1:
            self.violate(f"{id} at place {place} of {claim.key} runs after {self._last_place[claim.key]}")
        self._last_place[claim.key] = max(place, self._last_place.get(claim.key, 0))

    def _is_gone(self, other: Active) -> bool:
        """Whether it cannot notice that it has lost its turn: it is dead, stopped, or just woke up."""
        process = other.process
        just_now = self._paused_at.get(process, -1.0) >= self._world.now() - LATE_S
        return process.is_dead or process.is_paused or just_now or self._is_excused()

    def _is_excused(self) -> bool:
        return self._world.now() < self.excused_until

    def ends(self, process: Process, claim: Claim, id: str, result: Any) -> None:
        """It has returned, raised (`result` is the error), or was broken off."""
        running = self._active[claim.key]
        running[:] = [one for one in running if (one.id, one.token) != (id, claim.token)]
        if isinstance(result, BaseException):
            self._raised.add(id)
            if isinstance(result, errors.OutcomeUnknownError) and not isinstance(result, errors.SerialError):
                self._unknown_to_it.setdefault(id, []).append(claim.token)
            if isinstance(result, errors.OutcomeUnknownError | asyncio.CancelledError):
                self._unknown.add(id)
        else:
            self._returned.setdefault(id, []).append(result)
        self.note(f"{process.name} ends {id}: {result!r}")

    def writes(self, claim: Claim, id: str) -> bool:
        """A store outside, which refuses tokens that are lower than the highest it has seen."""
        if claim.token < self._fences.get(claim.key, 0):
            self.note(f"the write of {id} with {claim.token} is refused")
            raise errors.PermanentError("a newer token was here")
        self._fences[claim.key] = claim.token
        accepted = self.accepted.setdefault(claim.key, [])
        if id in accepted:
            self.violate(f"{id} is accepted twice")
        is_feasible = len(accepted) < self._world.capacity
        if is_feasible:
            accepted.append(id)
        return is_feasible

    # Callers.

    def answered(self, process: Process, ask: "Ask", answer: Any, deadline: float) -> None:
        """A caller has its result, or an error."""
        now, id = self._world.now(), ask.id
        self.note(f"{process.name} is told {id}: {answer!r}")
        was_stopped = self._paused_at.get(process, -1.0) >= now - LATE_S
        if now > deadline + LATE_S and not was_stopped:
            self.violate(f"the caller of {id} waited {now - deadline:.3f} s longer than it said")
        if isinstance(answer, errors.ExpiredError):
            was_asked = NOT_ASKED not in str(answer) and NOT_ASKED_ANY_MORE not in str(answer)
            if was_asked and self._was_run(process, id, deadline - ask.timeout_s):
                self.violate(f"the caller of {id} is told that it was not run, and it was")
            if was_asked and "closed" in str(answer) and self._world.is_in_line(process, id):
                self.violate(f"the caller of {id} is told that it was closed, and it is in line still")
        elif isinstance(answer, errors.FailedError):
            if id not in self._raised:
                self.violate(f"the caller of {id} is told that it failed, and it has not")
        elif isinstance(answer, errors.RefusedError):
            if ask.nested is None and "another" not in str(answer):
                self.violate(f"{id} was refused, and it is no nested call: {answer}")
        elif isinstance(answer, errors.SerialError | errors.UnavailableError):
            pass
        elif isinstance(answer, BaseException):
            self.violate(f"the caller of {id} got {answer!r}")
        else:
            self._check_result(id, answer)

    def _was_run(self, process: Process, id: str, since: float) -> bool:
        """Whether it was run for this caller, or runs now for one who was there before."""
        if self._world.grade is Grade.ATOMIC:
            return False
        if self._begun_by.get((process, id), -1.0) > since:
            return True
        record = self._world.record(id)
        is_running = record is not None and record.token != 0 and record.reply is None
        return is_running and record is not None and record.asked_at < 1000.0 + since

    def _check_result(self, id: str, answer: Any) -> None:
        if answer not in self._returned.get(id, []):
            self.violate(f"the caller of {id} got {answer}, and the function returned {self._returned.get(id)}")
        if self._told.setdefault(id, answer) != answer:
            self.violate(f"two callers of {id} got {self._told[id]} and {answer}")
        record = self._world.record(id)
        if record is None or record.reply is None or record.reply.outcome is not Ending.DONE:
            self.violate(f"the caller of {id} got an answer that is not stored")
        elif msgspec.json.decode(record.reply.body) != answer:
            self.violate(f"the caller of {id} got {answer}, and {record.reply.body!r} is stored")

    # The store.

    def tick(self) -> None:
        """Nobody waits for itself, and what was stored stays."""
        if self._world.database._writer.locked():
            return
        for name, record in self._world.lines.records.items():
            if record.reply is not None and self._replies.setdefault(name, record.reply) != record.reply:
                self.violate(f"{record.request.id} was {self._replies[name]} and is {record.reply}")
        book = self._world.turns._book()
        for name in self._world.lines.nested:
            record = self._world.lines.records[name]
            request = record.request
            path = circle((("sim", request.key), record.token), request.within, book.holders, book.waits_for)
            if path is not None:
                self.violate(f"{request.id} waits for itself: {path}")

    def judge(self) -> None:
        """In the end: what stands is what was answered."""
        world = self._world
        if world.lines.holds or world.lines.waiting or world.lines.runs:
            lines = world.lines
            self.violate(f"not at rest: held {lines.holds}, waiting {lines.waiting}, running {lines.runs}")
        for record in world.lines.records.values():
            if record.reply is None or record.reply.outcome is not Ending.DONE:
                continue
            result, id = msgspec.json.decode(record.reply.body), record.request.id
            if result not in self._returned.get(id, []):
                self.violate(f"{result} is stored for {id}, and the function returned {self._returned.get(id)}")
        if world.grade is Grade.ATOMIC:
            self._judge_rows()

    def _judge_rows(self) -> None:
        """What was written in transactions is there exactly if the answer says so."""
        rows = self._world.database.table("schedule")
        replies = [record.reply for record in self._world.lines.records.values() if record.reply is not None]
        done = [reply for reply in replies if reply.outcome is Ending.DONE]
        said = {reply.id for reply in done if msgspec.json.decode(reply.body)["accepted"]}
        if set(rows) != said:
            self.violate(
                f"rows without an answer {sorted(set(rows) - said)}, or the reverse {sorted(said - set(rows))}"
            )
        for key in {row["key"] for row in rows.values()}:
            numbers = [row["n"] for row in rows.values() if row["key"] == key]
            if len(set(numbers)) < len(numbers) or len(numbers) > self._world.capacity:
                self.violate(f"{key} was decided upon side by side: {sorted(numbers)}")
