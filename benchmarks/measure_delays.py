"""Postgres: milliseconds from sending to committed at a steady rate, with few and with many keys known, by turns."""

import statistics
import sys

import msgspec

from benchmarks.drain import Job
from benchmarks.figure import Figure, Scale
from benchmarks.machine import ROOT
from benchmarks.measure_latency import percentiles
from benchmarks.measure_postgres import drained, durable_server

sys.path.insert(0, str(ROOT / "tests"))

from servers.machine import MissingServerError
from servers.postgres import PostgresServer

FEW_KEYS = 1_000
FEW_KEYS_MS, MANY_KEYS_MS = 20.0, 60.0
"""The 99th percentile, at most."""
ROUNDS_MAX = 3


def measure(scale: Scale) -> list[Figure]:
    """The ledger and the table know every key before the first message is sent."""
    try:
        with durable_server() as server:
            return _measure(scale, server)
    except MissingServerError as error:
        return [Figure(f"send to committed, keywise, {FEW_KEYS:,} keys, p99", None, "ms", str(error))]


def _measure(scale: Scale, server: PostgresServer) -> list[Figure]:
    many = max(scale.key_counts)
    turns: dict[tuple[str, int], list[list[Figure]]] = {
        (what, keys): [] for keys in (FEW_KEYS, many) for what in ("raw", "keywise")
    }
    for what, keys in turns:
        drained(server, what, _database(what, keys), Job(1, keys, scale.batch), "--known")
    for number in range(min(ROUNDS_MAX, scale.rounds)):
        for (what, keys), done in turns.items():
            done.append(_turn(scale, server, what, keys, number))
    targets = {("keywise", FEW_KEYS): FEW_KEYS_MS, ("keywise", many): MANY_KEYS_MS}
    return [figure for contender, done in turns.items() for figure in _medians(done, targets.get(contender))]


def _turn(scale: Scale, server: PostgresServer, what: str, keys: int, number: int) -> list[Figure]:
    """Versions are newer than those of all turns before."""
    url = server.url.removesuffix("postgres") + _database(what, keys)
    above = (number + 1) * round(scale.rate * scale.latency_s)
    arguments = [what, "--url", url, "--keys", str(keys), "--from-version", str(above)]
    return percentiles(scale, "benchmarks.latency_postgres", arguments, f"{what}, {keys:,} keys")


def _medians(turns: list[list[Figure]], p99_ms: float | None) -> list[Figure]:
    """The median over the turns of each percentile."""
    found = []
    for figures in zip(*turns, strict=True):
        values = [figure.value for figure in figures if figure.value is not None]
        note = f"{figures[0].note}; medians of {' '.join(f'{value:.1f}' for value in values)}"
        target = p99_ms if figures[0].name.endswith("p99") else None
        detail = {"turns": [figure.detail for figure in figures]}
        found.append(
            msgspec.structs.replace(
                figures[0], value=statistics.median(values), note=note, at_most=target, detail=detail
            )
        )
    return found


def _database(what: str, keys: int) -> str:
    return f"delays_{what}_{keys}"
