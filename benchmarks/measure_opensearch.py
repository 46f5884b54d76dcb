"""OpenSearch: documents per second through the sink beside a bare bulk loop, and through a whole pipeline."""

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import islice

import msgspec

import keywise
from benchmarks import keywise_sqlite, workload
from benchmarks.figure import Figure, Scale
from benchmarks.machine import ROOT, Bystander
from keywise.adapters.http.client import HttpClient, Server
from keywise.adapters.opensearch.sink import BATCH_MAX, connect
from keywise.core.change import Change
from keywise.core.entry import Claim
from keywise.core.events import Settled
from keywise.core.sink import Sink
from keywise.core.url import Address

sys.path.insert(0, str(ROOT / "tests"))

from servers.machine import MissingServerError
from servers.opensearch import HEAP, OpenSearchServer, opensearch_server

TARGET = 0.8
WARM = 20_000
"""Documents before the clock starts: the engine's compiler is busy with the first ones."""
FIELDS = {"content_id": "keyword", "payload_version": "long", "document_type": "keyword", "text": "text"}
AS_IT_COMES = {"http.max_content_length": "100mb", "thread_pool.write.queue_size": "10000"}
LINES = {"Content-Type": "application/x-ndjson"}


def measure(scale: Scale) -> list[Figure]:
    """On an engine of its own, with data on a disk and each request flushed, as it comes."""
    try:
        with opensearch_server(None, jvm=HEAP, **AS_IT_COMES) as server:
            return _measure(scale, server)
    except MissingServerError as error:
        return [Figure("sink / bare bulk loop on OpenSearch", None, "", str(error), at_least=TARGET)]


def _measure(scale: Scale, server: OpenSearchServer) -> list[Figure]:
    bodies = workload.once_each(2 * scale.keys, timestamps=True)
    asyncio.run(by_turns(server, "warm", bodies[:WARM]))
    turns: dict[str, list[float]] = {"bare": [], "sink": []}
    with Bystander() as bystander:
        for number in range(scale.rounds):
            speeds = asyncio.run(by_turns(server, f"round_{number}", bodies))
            for speed, name in zip(speeds, turns, strict=True):
                turns[name].append(speed)
    loop, sink = (statistics.median(speeds) for speeds in turns.values())
    paired = [s / b for b, s in zip(*turns.values(), strict=True)]
    flow = statistics.median(asyncio.run(drained(server, f"flow_{n}", bodies)) for n in range(min(3, scale.rounds)))
    what = f"{len(bodies):,} documents of about 300 bytes, {BATCH_MAX} in a request, one request at a time"
    return [
        Figure("bare bulk loop on OpenSearch", loop, "documents/s", what),
        Figure(
            "sink on OpenSearch",
            sink,
            "documents/s",
            "the same, by the same client; the two by turns, request by request",
        ),
        Figure(
            "sink / bare bulk loop on OpenSearch",
            statistics.median(paired),
            "",
            f"median of {scale.rounds}, {min(paired):.2f} to {max(paired):.2f}",
            at_least=TARGET,
            detail={"turns": turns, "others": bystander.others},
        ),
        Figure("pipeline into OpenSearch", flow, "documents/s", "queue and ledger in SQLite, one process"),
    ]


async def by_turns(server: OpenSearchServer, index: str, bodies: Sequence[bytes]) -> tuple[float, float]:
    """Documents per second of the bare loop and of the sink, each into an index of its own.

    They take turns with each request, and who is first takes turns too: whatever else goes on meets both alike.
    """
    names = {"bare": f"{index}_bare", "sink": f"{index}_sink"}
    urls = {what: server.index(name, FIELDS) for what, name in names.items()}
    took_s = dict.fromkeys(names, 0.0)
    async with (
        HttpClient(Server("http", "127.0.0.1", server.port)) as client,
        connect(Address(urls["sink"], "bench", {})) as sink,
    ):
        acts: list[tuple[str, Callable[[Sequence[bytes]], Awaitable[None]]]] = [
            ("bare", lambda batch: bare(batch, client, names["bare"])),
            ("sink", lambda batch: sunk(batch, sink)),
        ]
        for batch in _batches(bodies):
            acts.reverse()
            for what, act in acts:
                started = time.perf_counter()
                await act(batch)
                took_s[what] += time.perf_counter() - started
    for name in names.values():
        _check(server, name, bodies)
    return len(bodies) / took_s["bare"], len(bodies) / took_s["sink"]


async def bare(batch: Sequence[bytes], client: HttpClient, index: str) -> None:
    """What anybody would write who has an HTTP client: lines with external versions, and a look at the answer."""
    lines = []
    for body in batch:
        change = workload.decode(body)
        head = {"_id": change.content_id, "version": change.payload_version, "version_type": "external"}
        lines.append(b"%b\n%b\n" % (msgspec.json.encode({"index": head}), body))
    path = f"/{index}/_bulk?filter_path=errors"
    answer = await client.request("POST", path, body=b"".join(lines), headers=LINES, timeout_s=60)
    assert answer.body == b'{"errors":false}', answer.body


async def sunk(batch: Sequence[bytes], sink: Sink) -> None:
    """The same through the sink, under claims as a ledger would give them."""
    changes = [_change(body) for body in batch]
    results = await sink.apply(changes, [Claim(one.key, one.order, False, 1) for one in changes])
    assert {result.outcome for result in results} == {"applied"}, results


async def drained(server: OpenSearchServer, index: str, bodies: Sequence[bytes]) -> float:
    """A queue that is filled before the clock starts, brought to its end."""
    url = server.index(index, FIELDS)
    with tempfile.TemporaryDirectory() as folder:
        app = keywise.App(f"sqlite:///{folder}/bench.db")
        pipeline = app.pipeline(keywise_sqlite.PIPELINE, key="content_id", version="payload_version")
        pipeline.source(f"sqlite:///{folder}/bench.db").sink(url)
        async with app:
            await app.send(keywise_sqlite.PIPELINE, *bodies)
            finish = await keywise_sqlite.drain(app, len(bodies), counted=Settled)
    _check(server, index, bodies)
    return len(bodies) / finish.elapsed_s


def _change(body: bytes) -> Change[object]:
    routed = workload.decode(body)
    return Change(routed.content_id, (0, routed.payload_version, 0), body=body)


def _batches(bodies: Sequence[bytes]) -> Iterator[list[bytes]]:
    rest = iter(bodies)
    while batch := list(islice(rest, BATCH_MAX)):
        yield batch


def _check(server: OpenSearchServer, index: str, bodies: Sequence[bytes]) -> None:
    """All of them are there; then the index goes, so that the engine has the same work each time."""
    server.ask("POST", f"/{index}/_refresh")
    found = server.ask("GET", f"/{index}/_count")["count"]
    assert found == len(bodies), f"{found} of {len(bodies)} documents"
    server.ask("DELETE", f"/{index}")
