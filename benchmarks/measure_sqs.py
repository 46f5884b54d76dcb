"""SQS: messages per second through the source beside a bare loop of its client library, on ElasticMQ."""

import statistics
import sys

import msgspec

from benchmarks.drain import Drained, Job
from benchmarks.figure import Figure, Scale
from benchmarks.machine import ROOT, Bystander, run_module

sys.path.insert(0, str(ROOT / "tests"))

from servers.elasticmq import ElasticMqServer, elasticmq_server
from servers.machine import MissingServerError

TARGET = 0.8
CHANGES_MAX = 20_000
"""A message takes a hundred times as long as one of SQLite."""
Turns = dict[str, list[Drained]]


def measure(scale: Scale) -> list[Figure]:
    """On a server of its own that keeps messages in memory: the client is the wall."""
    try:
        with elasticmq_server() as server:
            return _ratio(scale, server)
    except MissingServerError as error:
        return [Figure("source / bare loop on SQS", None, "", str(error), at_least=TARGET)]


def drained(server: ElasticMqServer, what: str, job: Job) -> Drained:
    """One drain in a fresh process."""
    return msgspec.convert(run_module("benchmarks.drain_sqs", [what, "--url", server.url, *job.arguments()]), Drained)


def _ratio(scale: Scale, server: ElasticMqServer) -> list[Figure]:
    job = Job(min(scale.changes, CHANGES_MAX), min(scale.keys, CHANGES_MAX), scale.batch)
    turns: Turns = {"bare": [], "source": []}
    for what in turns:
        drained(server, what, job)  # The first requests to a fresh JVM take up to a hundred times as long.
    with Bystander() as bystander:
        for _ in range(scale.rounds):
            for what, done in turns.items():
                done.append(drained(server, what, job))
    bare, source = (statistics.median(one.changes_per_s for one in done) for done in turns.values())
    bare_cpu, source_cpu = (statistics.median(one.cpu_us_per_change for one in done) for done in turns.values())
    paired = [s.changes_per_s / b.changes_per_s for b, s in zip(turns["bare"], turns["source"], strict=True)]
    return [
        Figure("bare loop on SQS", bare, "messages/s", f"{bare_cpu:.1f} µs of CPU a message in the client"),
        Figure("source on SQS", source, "messages/s", f"{source_cpu:.1f} µs of CPU a message in the client"),
        Figure(
            "source / bare loop on SQS",
            source / bare,
            "",
            f"medians of {scale.rounds}, turn by turn {min(paired):.2f} to {max(paired):.2f}",
            at_least=TARGET,
            detail={"job": job, "turns": turns, "others": bystander.others},
        ),
    ]
