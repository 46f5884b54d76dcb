"""The SQS service that queues live in: where it is, as whom it is asked, and how long an answer may take."""

import asyncio
import functools
import re
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from typing import Any, TypeAlias

from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore.loaders import Loader, create_loader

from keywise.adapters.sqs.errors import sqs_errors
from keywise.core.errors import AddressError
from keywise.core.url import Address, redacted

Answer: TypeAlias = dict[str, Any]

CONNECT_S = 10.0
ANSWER_S = 20.0
"""How long an answer may take before the service counts as unreachable."""
LONG_POLL_S = 20
"""The longest that SQS allows."""
LOCAL_REGION = "us-east-1"
"""Requests to a server that is not Amazon's are signed for this region, unless another one is set."""
OPTIONS = ("region", "profile", "tls")
"""What a URL may say about the connection."""

_REGION = re.compile(r"(?:^|\.)sqs(?:-fips)?\.([a-z0-9-]+)\.(?:vpce\.|api\.)?(?:amazonaws|amazonwebservices)\.")


class SqsService:
    """One endpoint with one set of credentials. Each source has connections of its own."""

    def __init__(self, name: str, endpoint: str, region: str = "", profile: str = "") -> None:
        self.name = name
        """The URL of the source, for messages."""
        self.endpoint = endpoint
        self.client: Any = None
        self._region = region
        self._profile = profile
        self._stack = AsyncExitStack()
        self._is_started = False

    async def open(self, connections: int) -> None:
        """Make the client; nothing is asked yet."""
        config = AioConfig(
            connect_timeout=CONNECT_S,
            read_timeout=LONG_POLL_S + 2 * ANSWER_S,
            max_pool_connections=connections,
            # The flow retries. Parameters are built by the adapter, and checking them costs a fifth of a call.
            retries={"total_max_attempts": 1},
            parameter_validation=False,
            tcp_keepalive=True,
        )
        with sqs_errors(self.name, at_start=True):
            session = AioSession(profile=self._profile or None)
            session.register_component("data_loader", _descriptions(session.get_config_variable("data_path")))
            region = self._region or session.get_config_variable("region") or LOCAL_REGION
            made = session.create_client("sqs", region_name=region, endpoint_url=self.endpoint, config=config)
            self.client = await self._stack.enter_async_context(made)

    async def close(self) -> None:
        self._is_started = False
        await self._stack.aclose()

    def started(self) -> None:
        """From now on, a missing queue is an outage and not a mistake."""
        self._is_started = True

    async def answered(self, request: Awaitable[Answer], limit_s: float = ANSWER_S) -> Answer:
        """Return the answer to a request of the client."""
        with sqs_errors(self.name, at_start=not self._is_started):
            async with asyncio.timeout(limit_s):
                return await request


def service_at(address: Address, options: dict[str, str]) -> SqsService:
    """The service of a URL. Credentials come from the environment, a profile or a role, never from the URL."""
    url = redacted(address.url)
    if not address.host or "," in address.host:
        raise AddressError(f"{url} names no host; write for example sqs://sqs.eu-west-1.amazonaws.com/ACCOUNT/QUEUE")
    if "@" in address.host:
        raise AddressError(
            f"{url} has a user; credentials never belong into the URL: set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, name a profile with profile=, or give the machine a role"
        )
    address.check_ports()
    if (tls := options.get("tls", "on")) not in ("on", "off"):
        raise AddressError(f"{url}: tls={tls} has to be on or off")
    region = options.get("region", "")
    if not region and (found := _REGION.search(address.host)):
        region = found[1]
    if not region and "amazonaws." in address.host:
        raise AddressError(f"{url} does not show its region; add for example region=eu-west-1")
    scheme = "https" if tls == "on" else "http"
    return SqsService(url, f"{scheme}://{address.host}", region, options.get("profile", ""))


@functools.cache
def _descriptions(folders: str | None) -> Loader:
    """The client library's descriptions of AWS services, which never change: read once, not for each source."""
    return create_loader(folders)
