"""Goes over everything that a contender wrote: what was written backwards, at once, twice, or wrong in the end."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from benchmarks import workload
from benchmarks.peers.record import Kind, Line, code


class Rewrite(msgspec.Struct, frozen=True, array_like=True):
    """What the table itself told of a write that was not newer than what it replaced."""

    key: str
    before: int
    version: int


class Verdict(msgspec.Struct, frozen=True):
    """What the checker found."""

    backwards: int | None
    """Order violations: an older version of a key written after a newer one. None: nothing was to be written."""
    repeats: int | None
    """A version that was already there, written once more. None: nothing was to be written."""
    overlaps: int | None
    """Calls of a handler that began while another one for the same key ran. None: no handler was called, or it did
    nothing, and two calls that take no time cannot overlap."""
    wrong: int
    """Keys that do not hold their newest version in the end. If nothing was to be written: keys for whose newest
    version no handler was called."""
    calls: int | None
    """Calls of handlers that were not skipped. None: there is no handler."""
    out_of_turn: int | None
    """Keys whose changes were not handled in the order in which they were sent. None: not all were to be handled."""


def check(sent: Sequence[bytes], lines: Sequence[Line], rewrites: Sequence[Rewrite], stored: dict[str, int]) -> Verdict:
    """Judge by what was sent, the log of the handlers, what the table recorded, and what it holds in the end."""
    truth = workload.newest(sent)
    calls = [line for line in lines if line.kind in (Kind.WROTE, Kind.CALLED)]
    is_table = not any(line.kind is not Kind.SETTLED for line in lines)
    return Verdict(
        backwards=sum(rewrite.version < rewrite.before for rewrite in rewrites),
        repeats=sum(rewrite.version == rewrite.before for rewrite in rewrites),
        overlaps=None if is_table else overlaps(calls),
        wrong=sum(stored.get(key) != truth.get(key) for key in {*truth, *stored}),
        calls=None if is_table else len(calls),
        out_of_turn=_out_of_turn(sent, calls) if len(calls) == len(sent) else None,
    )


def check_calls(sent: Sequence[bytes], lines: Sequence[Line]) -> Verdict:
    """Judge handlers that do nothing: by what was sent, and their log."""
    calls = [line for line in lines if line.kind in (Kind.WROTE, Kind.CALLED)]
    handled = {(call.key, call.version) for call in calls}
    return Verdict(
        backwards=None,
        repeats=None,
        overlaps=None,
        wrong=sum((code(key), version) not in handled for key, version in workload.newest(sent).items()),
        calls=len(calls),
        out_of_turn=_out_of_turn(sent, calls) if len(calls) == len(sent) else None,
    )


def overlaps(calls: Iterable[Line]) -> int:
    """Calls that began before an earlier one of the same key had ended."""
    found, busy_until = 0, dict[bytes, int]()
    for call in sorted(calls, key=lambda call: call.began_ns):
        found += call.began_ns < busy_until.get(call.key, 0)
        busy_until[call.key] = max(call.ended_ns, busy_until.get(call.key, 0))
    return found


def _out_of_turn(sent: Sequence[bytes], calls: Iterable[Line]) -> int:
    due, done = defaultdict[bytes, list[int]](list), defaultdict[bytes, list[int]](list)
    for body in sent:
        change = workload.decode(body)
        due[code(change.content_id)].append(change.payload_version)
    for call in sorted(calls, key=lambda call: call.ended_ns):
        done[call.key].append(call.version)
    return sum(due[key] != done[key] for key in due)
