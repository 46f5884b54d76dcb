"""RabbitMQ: messages per second through the source beside a bare loop of its client library, and into a table."""

import statistics
import sys

import msgspec

from benchmarks.drain import Drained, Job
from benchmarks.figure import Figure, Scale
from benchmarks.machine import ROOT, Bystander, run_module

sys.path.insert(0, str(ROOT / "tests"))

from servers.machine import MissingServerError
from servers.rabbitmq import RabbitServer, rabbit_server

TARGET = 0.8
Turns = dict[str, list[Drained]]


def measure(scale: Scale) -> list[Figure]:
    """On a broker of its own with the settings that it comes with, on a disk, and a durable classic queue."""
    try:
        with rabbit_server(scratch=None) as server:
            return [*_ratio(scale, server), _whole(scale, server)]
    except MissingServerError as error:
        return [Figure("source / bare loop on RabbitMQ", None, "", str(error), at_least=TARGET)]


def drained(server: RabbitServer, what: str, job: Job) -> Drained:
    """One drain in a fresh process."""
    arguments = [what, "--url", server.url, *job.arguments()]
    return msgspec.convert(run_module("benchmarks.drain_rabbitmq", arguments), Drained)


def _ratio(scale: Scale, server: RabbitServer) -> list[Figure]:
    job = Job(scale.changes, scale.keys, scale.batch)
    turns: Turns = {"bare": [], "source": []}
    with Bystander() as bystander:
        for _ in range(scale.rounds):
            for what, done in turns.items():
                done.append(drained(server, what, job))
    bare, source = (statistics.median(one.changes_per_s for one in done) for done in turns.values())
    bare_cpu, source_cpu = (statistics.median(one.cpu_us_per_change for one in done) for done in turns.values())
    paired = [s.changes_per_s / b.changes_per_s for b, s in zip(turns["bare"], turns["source"], strict=True)]
    return [
        Figure("bare loop on RabbitMQ", bare, "messages/s", f"{bare_cpu:.1f} µs of CPU a message in the client"),
        Figure("source on RabbitMQ", source, "messages/s", f"{source_cpu:.1f} µs of CPU a message in the client"),
        Figure(
            "source / bare loop on RabbitMQ",
            source / bare,
            "",
            f"medians of {scale.rounds}, turn by turn {min(paired):.2f} to {max(paired):.2f}",
            at_least=TARGET,
            detail={"job": job, "turns": turns, "others": bystander.others},
        ),
    ]


def _whole(scale: Scale, server: RabbitServer) -> Figure:
    job = Job(scale.changes, scale.keys, scale.batch)
    turns = [drained(server, "keywise", job) for _ in range(min(3, scale.rounds))]
    speed = statistics.median(one.changes_per_s for one in turns)
    cpu = statistics.median(one.cpu_us_per_change for one in turns)
    note = f"{cpu:.1f} µs of CPU a change in the client"
    return Figure("RabbitMQ to a table in SQLite", speed, "changes/s", note, detail={"turns": turns})
