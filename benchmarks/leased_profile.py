"""What a handler call costs on Postgres: in the client by part, as its stack shows, and in the server by statement.

The handler does nothing, and each change has a key of its own. One turn runs in a process of its own and prints one
JSON line; `measure` runs several turns, also of an earlier revision.
"""

import argparse
import asyncio
import io
import os
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import asyncpg
import msgspec

import keywise
from benchmarks import keywise_sqlite, workload
from benchmarks.drain_postgres import PIPELINE, handler_app, vacuum
from benchmarks.machine import ROOT, run_module
from benchmarks.peers import processes
from benchmarks.peers.race import postmaster_of
from benchmarks.peers.sampler import Sampler
from keywise.core.events import Event, Settled, Started

sys.path.insert(0, str(ROOT / "tests"))

from servers.postgres import PostgresServer, postgres_server

LOOP = "event loop and sockets"
PARTS = {
    "benchmarks/leased_profile.py": LOOP,
    "src/keywise/adapters/function": "calling the handler",
    "src/keywise/adapters/postgres/ledger": "ledger: claim and commit",
    "src/keywise/adapters/postgres/source": "queue: receive and ack",
    "src/keywise/adapters": "connections",
    "src/keywise/flow/leased/executors.py": "calling the handler",
    "src/keywise/flow/leased/dispatch.py": "calling the handler",
    "src/keywise/flow/heartbeat.py": "calling the handler",
    "src/keywise/flow/leased": "worker: scheduling and outcomes",
    "src/keywise/flow/settlement.py": "worker: scheduling and outcomes",
    "src/keywise/flow/lanes.py": "lanes",
    "src/keywise/flow/intake.py": "reading messages",
    "src/keywise/core/bodies.py": "reading messages",
    "src/keywise/core/change.py": "reading messages",
    "src/keywise/core/events.py": "events and observers",
    "src/keywise/observe": "events and observers",
    "src/keywise": "everything else of keywise",
}
"""The innermost file on the stack that is listed here says which part runs; its client library counts for it too."""
STATEMENTS = {
    "receive": r"insert into keywise_held",
    "ack": r"delete from keywise_held",
    "look for messages": r"keywise_(ready|held)",
    "claim": r"insert into keywise_active",
    "commit": r"delete from keywise_active",
    "ledger, other statements": r"keywise_(marks|active|scopes)",
    "other statements": "",
}
"""The first pattern that a statement contains says which part it is."""
RESET = "select pg_stat_statements_reset()"
SPENT = """
select query, total_exec_time / 1000 as seconds from pg_stat_statements
where dbid = (select oid from pg_database where datname = current_database())
"""


class LeasedProfile(msgspec.Struct, frozen=True):
    """Microseconds per change."""

    client: dict[str, float]
    """CPU time of the worker, by part."""
    server: float
    """CPU time of all processes of the server."""
    statements: dict[str, float]
    """By the clock on the wall, inside the server, by statement."""


class Comparison(msgspec.Struct, frozen=True):
    """The medians of all turns: of the working tree, and of an earlier revision if one was given."""

    now: LeasedProfile
    before: LeasedProfile | None
    revision: str
    """The short name of the earlier revision and its date; empty without one."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True, help="an empty database of a server with pg_stat_statements")
    parser.add_argument("--changes", type=int, required=True)
    options = parser.parse_args()
    print(msgspec.json.encode(asyncio.run(profile(options.url, options.changes))).decode())


async def profile(url: str, changes: int) -> LeasedProfile:
    """Fill the queue, work it off under a sampler, and ask the server what it did meanwhile."""
    server, sampler = await postmaster_of(url), Sampler(PARTS)
    spent_s: list[float] = []

    def watch(event: Event) -> None:
        if isinstance(event, Started):
            spent_s.append(processes.family_cpu_s(server))
            sampler.start()

    async with handler_app(url, _do_nothing) as app:
        await app.send(PIPELINE, *workload.once_each(changes))
        await vacuum(url)
        connection = await asyncpg.connect(url)
        await connection.execute("create extension pg_stat_statements")
        await connection.execute(RESET)
        finish = await keywise_sqlite.drain(app, changes, watch, counted=Settled)
        shares = sampler.stop()
        spent_s.append(processes.family_cpu_s(server))
        statements = _by_part(await connection.fetch(SPENT))
        await connection.close()
    us = 1e6 / changes
    return LeasedProfile(
        client={part: share * finish.cpu_s * us for part, share in shares.items()},
        server=(spent_s[1] - spent_s[0]) * us,
        statements={part: seconds * us for part, seconds in statements.items()},
    )


def measure(changes: int, rounds: int, revision: str | None) -> Comparison:
    """Turn by turn, each in a fresh process and a fresh database; the earlier revision first."""
    now, before = list[LeasedProfile](), list[LeasedProfile]()
    with (
        _source_of(revision) as earlier,
        postgres_server(None, shared_preload_libraries="pg_stat_statements") as server,
    ):
        for number in range(rounds):
            if earlier is not None:
                before.append(_turn(server, f"before_{number}", changes, earlier))
            now.append(_turn(server, f"now_{number}", changes, None))
    return Comparison(_medians(now), _medians(before) if before else None, _named(revision) if revision else "")


def _turn(server: PostgresServer, name: str, changes: int, source: Path | None) -> LeasedProfile:
    arguments = ["--url", server.create_database(name), "--changes", str(changes)]
    environment = dict(os.environ)
    if source is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(source), environment.get("PYTHONPATH", "")])
    return msgspec.convert(run_module("benchmarks.leased_profile", arguments, environment=environment), LeasedProfile)


def _named(revision: str) -> str:
    command = ["git", "log", "-1", "--format=%h of %as", revision]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


@contextmanager
def _source_of(revision: str | None) -> Iterator[Path | None]:
    """The source of a revision of this repository in a folder of its own."""
    if revision is None:
        yield None
        return
    command = ["git", "archive", "--format=tar", revision, "src"]
    packed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="keywise-before-") as folder:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder) / "src"


def _medians(turns: Sequence[LeasedProfile]) -> LeasedProfile:
    return LeasedProfile(
        _median_of_each([one.client for one in turns]),
        statistics.median(one.server for one in turns),
        _median_of_each([one.statements for one in turns]),
    )


def _median_of_each(turns: Sequence[dict[str, float]]) -> dict[str, float]:
    """What comes in no more than half of the turns counts as nothing in the others."""
    parts = {part for turn in turns for part in turn}
    return {part: statistics.median(turn.get(part, 0.0) for turn in turns) for part in sorted(parts)}


def _by_part(rows: Sequence[asyncpg.Record]) -> dict[str, float]:
    found: defaultdict[str, float] = defaultdict(float)
    for query, seconds in rows:
        found[next(part for part, pattern in STATEMENTS.items() if re.search(pattern, query))] += seconds
    return dict(found)


async def _do_nothing(change: keywise.Change[object]) -> None:
    pass


if __name__ == "__main__":
    main()
