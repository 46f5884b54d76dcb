"""Changes per second on Postgres beside the raw loop: turn by turn, each in a fresh process and a fresh database."""

import statistics
import sys

import msgspec

from benchmarks.drain import Drained, Job
from benchmarks.figure import Figure, Scale
from benchmarks.machine import ROOT, Bystander, run_module

sys.path.insert(0, str(ROOT / "tests"))

from servers.postgres import MissingServerError, PostgresServer, postgres_server

TARGET = 0.7
STRETCH = 0.85


def measure(scale: Scale) -> list[Figure]:
    """The ratio for even keys, on a durable server with the settings that it comes with."""
    try:
        with postgres_server(None) as server:
            return _ratio(scale, server)
    except MissingServerError as error:
        return [Figure("keywise / raw on Postgres", None, "", str(error), at_least=TARGET)]


def _ratio(scale: Scale, server: PostgresServer) -> list[Figure]:
    job = Job(scale.changes, scale.keys, scale.batch)
    turns: dict[str, list[Drained]] = {"raw": [], "keywise": []}
    with Bystander() as bystander:
        for number in range(scale.rounds):
            for what, drained in turns.items():
                url = server.create_database(f"{what}_{number}")
                arguments = [what, "--url", url, *job.arguments()]
                drained.append(msgspec.convert(run_module("benchmarks.drain_postgres", arguments), Drained))
    raw, keywise = (statistics.median(one.changes_per_s for one in drained) for drained in turns.values())
    raw_cpu, keywise_cpu = (statistics.median(one.cpu_us_per_change for one in drained) for drained in turns.values())
    paired = [k.changes_per_s / r.changes_per_s for r, k in zip(turns["raw"], turns["keywise"], strict=True)]
    return [
        Figure("raw loop on Postgres", raw, "changes/s", f"{raw_cpu:.1f} µs of CPU a change in the client"),
        Figure("keywise on Postgres", keywise, "changes/s", f"{keywise_cpu:.1f} µs of CPU a change in the client"),
        Figure(
            "keywise / raw on Postgres",
            keywise / raw,
            "",
            f"medians of {scale.rounds}, turn by turn {min(paired):.2f} to {max(paired):.2f}; stretch {STRETCH:g}",
            at_least=TARGET,
            # The server is no child of this process, so its own work counts as that of others.
            detail={"job": job, "turns": turns, "others": bystander.others},
        ),
    ]
