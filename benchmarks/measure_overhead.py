"""CPU time per change that keywise spends on itself: in lanes and scheduling, not in SQL, decoding or the sink."""

import statistics
import time
from collections.abc import Sequence

import msgspec

from benchmarks import workload
from benchmarks.drain import Job
from benchmarks.figure import Figure, Scale
from benchmarks.layers import Profile
from benchmarks.machine import run_module
from benchmarks.stopwatch import REST, WAIT
from keywise.core.change import Delivery, Outcome
from keywise.flow.intake import FieldRoute, Fields, MessageReader
from keywise.flow.lanes import Lanes, Ticket

TARGET_US = 1.5
HALF_OURS = ("look", "begin", "commit")
"""Of these layers the part inside SQLite is not ours; asyncio, locks and the hop to the other thread are."""


def measure(scale: Scale) -> list[Figure]:
    """One figure for the way that needs no lanes, with what it leaves out, and one for the lanes."""
    job = Job(scale.overhead_changes, scale.keys, scale.batch)
    answers = [run_module("benchmarks.layers", ["keywise", "--cpu", *job.arguments()]) for _ in range(scale.rounds)]
    profiles = msgspec.convert(answers, list[Profile])
    making = statistics.median(one.layers["decode"] - one.decode for one in profiles)
    return [
        Figure(
            "coalescing and scheduling, queue_transaction",
            statistics.median(map(own_us, profiles)),
            "µs of CPU/change",
            "coalescing, outcomes, events, observers, asyncio; not SQL, adapters or decoding",
            at_most=TARGET_US,
            detail={"job": job, "profiles": profiles},
        ),
        Figure("making changes and tickets", making, "µs of CPU/change", "reading a batch less its bare decoding"),
        Figure("lanes: add, take, finish", lanes_us(job), "µs of CPU/change", "for queues that live elsewhere"),
    ]


def own_us(profile: Profile) -> float:
    """All CPU time of the event loop's thread that is not spent inside a plug or SQLite."""
    between = sum(profile.layers.get(layer, 0.0) - profile.in_sqlite.get(layer, 0.0) for layer in HALF_OURS)
    return between + sum(profile.layers.get(layer, 0.0) for layer in ("coalesce", REST, WAIT))


def lanes_us(job: Job) -> float:
    """The cost of passing through the lanes, in batches as a consumer takes them."""
    bodies = workload.changes(job.changes, job.keys, job.distribution)
    reader = MessageReader(FieldRoute(Fields("content_id", "payload_version")), body_max_bytes=10_000)
    deliveries = [Delivery(number, number, body, 0.0) for number, body in enumerate(bodies)]
    batches = [
        reader.read(deliveries[start : start + job.batch], 0, 0.0).tickets
        for start in range(0, len(deliveries), job.batch)
    ]
    lanes = Lanes(4 * job.batch)
    started = time.process_time()
    ended = sum(_pass(lanes, tickets) for tickets in batches)
    elapsed_s = time.process_time() - started
    assert ended == len(bodies) and len(lanes) == 0
    return 1e6 * elapsed_s / ended


def _pass(lanes: Lanes, tickets: Sequence[Ticket]) -> int:
    ended = 0
    lanes.add(tickets)
    while taken := lanes.take(len(tickets), 0.0):
        for ticket in taken:
            ended += len(lanes.finish(ticket, Outcome.APPLIED, ticket.change.order))
    return ended
