"""A service of Amazon: where it is, as whom it is asked, and how long an answer may take."""

import asyncio
import functools
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from typing import Any, TypeAlias

from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore.loaders import Loader, create_loader

from keywise.adapters.aws.errors import ErrorCodes, aws_errors

Answer: TypeAlias = dict[str, Any]

CONNECT_S = 10.0
ANSWER_S = 20.0
"""How long an answer may take before the service counts as unreachable."""
USER_AGENT = "keywise"
LOCAL_REGION = "us-east-1"
"""Requests to a server that is not Amazon's are signed for this region, unless another one is set."""


class AwsService:
    """One endpoint with one set of credentials. Each adapter has connections of its own."""

    def __init__(self, codes: ErrorCodes, name: str, endpoint: str = "", region: str = "", profile: str = "") -> None:
        self.name = name
        """The URL of the adapter, for messages."""
        self.endpoint = endpoint
        """Empty: that of Amazon in the region."""
        self.client: Any = None
        self._codes = codes
        self._region = region
        self._profile = profile
        self._stack = AsyncExitStack()
        self._is_started = False

    async def open(self, connections: int, answer_max_s: float = ANSWER_S) -> None:
        """Make the client; nothing is asked yet."""
        config = AioConfig(
            connect_timeout=CONNECT_S,
            # `answered` ends a call before that.
            read_timeout=2 * answer_max_s,
            max_pool_connections=connections,
            # The flow retries. Parameters are built by the adapter, and checking them costs a fifth of a call.
            retries={"total_max_attempts": 1},
            parameter_validation=False,
            tcp_keepalive=True,
            # The client composes its own name twice a call, which costs a tenth of it.
            user_agent=USER_AGENT,
        )
        with aws_errors(self.name, self._codes, at_start=True):
            session = AioSession(profile=self._profile or None)
            session.register_component("data_loader", _descriptions(session.get_config_variable("data_path")))
            region = self._region or session.get_config_variable("region") or LOCAL_REGION
            made = session.create_client(
                self._codes.service.lower(), region_name=region, endpoint_url=self.endpoint or None, config=config
            )
            self.client = await self._stack.enter_async_context(made)

    async def close(self) -> None:
        self._is_started = False
        await self._stack.aclose()

    def started(self) -> None:
        """From now on, a missing queue or table is an outage and not a mistake."""
        self._is_started = True

    async def answered(self, request: Awaitable[Answer], limit_s: float = ANSWER_S) -> Answer:
        """Return the answer to a request of the client."""
        with aws_errors(self.name, self._codes, at_start=not self._is_started):
            async with asyncio.timeout(limit_s):
                return await request


@functools.cache
def _descriptions(folders: str | None) -> Loader:
    """The client library's descriptions of AWS services, which never change: read once, not for each adapter."""
    return create_loader(folders)
