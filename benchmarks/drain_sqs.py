"""One timed drain of an SQS queue in a process of its own: fills a queue, takes everything from it, deletes it.

The bare loop is the client library's own: as many tasks side by side, receives and deletions in tens, nothing else.
"""

import argparse
import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session

from benchmarks import workload
from benchmarks.drain import Drained, Job, add_job_arguments
from keywise.adapters.sqs.service import sqs_service
from keywise.adapters.sqs.source import REQUESTS, SqsSource

QUEUE = "bench"
ACCOUNT = "000000000000"
WAIT_S = 5.0
VISIBILITY_S = 600
READ = ["ApproximateReceiveCount", "SentTimestamp"]

Timed = tuple[float, float]
"""Seconds by the clock on the wall, and seconds of CPU."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=sorted(DRAINS))
    parser.add_argument("--url", required=True, help="of a server that speaks SQS")
    add_job_arguments(parser)
    options = parser.parse_args()
    os.environ |= {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}
    job = Job(options.changes, options.keys, options.batch, options.distribution)
    bodies = workload.changes(job.changes, job.keys, job.distribution)
    elapsed_s, cpu_s = asyncio.run(_drained(DRAINS[options.what], job, bodies, options.url))
    print(msgspec.json.encode(Drained(job.changes / elapsed_s, 1e6 * cpu_s / job.changes)).decode())


async def drain_bare(job: Job, url: str) -> Timed:
    """Only aiobotocore, which does not check parameters either: receive ten, delete ten, until everything has come."""
    seen, queue = 0, f"{url}/{ACCOUNT}/{QUEUE}"
    config = AioConfig(max_pool_connections=2 * REQUESTS, parameter_validation=False)
    async with get_session().create_client("sqs", region_name="us-east-1", endpoint_url=url, config=config) as client:

        async def take() -> None:
            nonlocal seen
            while seen < job.changes:
                answer = await client.receive_message(
                    QueueUrl=queue,
                    MaxNumberOfMessages=10,
                    VisibilityTimeout=VISIBILITY_S,
                    MessageSystemAttributeNames=READ,
                )
                if messages := answer.get("Messages"):
                    seen += len(messages)
                    entries = [{"Id": str(n), "ReceiptHandle": m["ReceiptHandle"]} for n, m in enumerate(messages)]
                    await client.delete_message_batch(QueueUrl=queue, Entries=entries)

        started, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(take() for _ in range(REQUESTS)))
        return time.perf_counter() - started, time.process_time() - cpu


async def drain_source(job: Job, url: str) -> Timed:
    """The source of keywise: deliveries with ids, receipts, times, counts and headers."""
    async with SqsSource(sqs_service("bench", url, "us-east-1"), QUEUE, ACCOUNT) as source:
        started, cpu, seen = time.perf_counter(), time.process_time(), 0
        while seen < job.changes:
            deliveries = await source.receive(job.batch, WAIT_S)
            await source.ack(deliveries)
            seen += len(deliveries)
        return time.perf_counter() - started, time.process_time() - cpu


async def _drained(
    drain: Callable[[Job, str], Coroutine[Any, Any, Timed]], job: Job, bodies: list[bytes], url: str
) -> Timed:
    async with get_session().create_client("sqs", region_name="us-east-1", endpoint_url=url) as client:
        await client.create_queue(QueueName=QUEUE)
    async with SqsSource(sqs_service("bench", url, "us-east-1"), QUEUE, ACCOUNT) as source:
        await source.send(bodies)
        timed = await drain(job, url)
        assert (left := await source.depth()) == 0, f"{left} messages are left"
    return timed


DRAINS: dict[str, Callable[[Job, str], Coroutine[Any, Any, Timed]]] = {"bare": drain_bare, "source": drain_source}

if __name__ == "__main__":
    main()
