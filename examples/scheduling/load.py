"""The load: callers that ask for visits over HTTP, some of them twice, and what each was told after how long."""

import argparse
import asyncio
import random
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.scheduling.care import CARS, CLOSES, OPENS, clock_of

DAYS = ("2026-12-01", "2026-12-02")
WINDOW_MINUTES = 180
LENGTHS_MINUTES = (30, 45, 60)
REPEATED = 10
"""One in so many requests is sent twice at once, as by a caller that lost patience."""
PATIENCE_S = 30.0

Fields = dict[str, Any]


class NoAnswerError(Exception):
    """Nobody answers at a URL; the message says what to do."""


class Told(msgspec.Struct, frozen=True):
    """What a caller was told."""

    request: Fields
    status: int
    body: Fields
    took_s: float


def care_requests(count: int, seed: int) -> list[Fields]:
    """Requests for all markets and days, with ids that no other run has; some of them are there twice."""
    rng, run = random.Random(seed), secrets.token_hex(4)
    requests = [_care_request(f"{run}-{number}", rng) for number in range(count)]
    return [each for number, one in enumerate(requests) for each in [one] * (1 if number % REPEATED else 2)]


def whole_day(market: str, day: str) -> Fields:
    """A request that any free hour of a day would do for."""
    window = _window(day, OPENS, CLOSES)
    return {"id": secrets.token_hex(8), "market": market, **window, "minutes": min(LENGTHS_MINUTES)}


async def ask_all(urls: Sequence[str], requests: Iterable[Fields], callers: int) -> list[Told]:
    """Ask from many callers at once, each of them one request after another, in turn at each of the URLs."""
    told: list[Told] = []
    failed: Exception | None = None
    left = enumerate(requests)
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=callers)) as session:

        async def caller() -> None:
            for number, request in left:
                told.append(await _ask(session, urls[number % len(urls)], request))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(callers):
                    group.create_task(caller())
        except* NoAnswerError as errors:
            failed = errors.exceptions[0]
    if failed is not None:
        raise failed
    return told


def percentile_ms(told: Iterable[Told], part: float) -> float:
    """How long the quickest of them took, up to that part of all."""
    took = sorted(one.took_s for one in told)
    return 1000 * took[min(len(took) - 1, int(part * len(took)))] if took else 0.0


def _care_request(id: str, rng: random.Random) -> Fields:
    market, day = rng.choice(list(CARS)), rng.choice(DAYS)
    earliest = rng.randrange(OPENS, CLOSES - WINDOW_MINUTES + 1, 30)
    window = _window(day, earliest, earliest + WINDOW_MINUTES)
    return {"id": id, "market": market, **window, "minutes": rng.choice(LENGTHS_MINUTES)}


def _window(day: str, earliest: int, latest: int) -> Fields:
    return {"earliest": f"{day}T{clock_of(earliest)}:00", "latest": f"{day}T{clock_of(latest)}:00"}


async def _ask(session: aiohttp.ClientSession, url: str, request: Fields) -> Told:
    began = time.monotonic()
    try:
        async with session.post(f"{url}/accept", json=request) as response:
            body = await response.json()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise NoAnswerError(
            f"no answer from {url}: {type(error).__name__}: {error}; "
            "start examples/scheduling/endpoint.py and give the URL that it prints, or try fewer callers"
        ) from error
    return Told(request, response.status, body, time.monotonic() - began)


def main() -> int:
    options = _options()
    urls = [url.rstrip("/") for url in options.url]
    try:
        told = asyncio.run(ask_all(urls, care_requests(options.requests, options.seed), options.callers))
    except NoAnswerError as error:
        sys.exit(str(error))
    for status, count in sorted(Counter(one.status for one in told).items()):
        sys.stdout.write(f"{count:6,} answers with status {status}\n")
    sys.stdout.write(f"p50 {percentile_ms(told, 0.5):.1f} ms, p99 {percentile_ms(told, 0.99):.1f} ms\n")
    return 0 if all(one.status in (200, 409) for one in told) else 1


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Ask a desk, or several with one schedule, for many visits at once.",
        epilog="example: .venv/bin/python examples/scheduling/load.py http://127.0.0.1:8080 --requests 1000",
    )
    parser.add_argument("url", nargs="+", help="as examples/scheduling/endpoint.py has printed it")
    parser.add_argument("--requests", type=positive, default=300, help="how many care requests there are")
    parser.add_argument("--callers", type=positive, default=32, help="how many ask at once")
    parser.add_argument("--seed", type=int, default=2024, help="what they ask for")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
