"""A proxy in front of the fake of Pub/Sub: it notes what is asked, and answers as the service does where it refuses."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.pubsub_v1 import types

REQUESTS = {
    "Pull": types.PullRequest,
    "Acknowledge": types.AcknowledgeRequest,
    "ModifyAckDeadline": types.ModifyAckDeadlineRequest,
    "GetSubscription": types.GetSubscriptionRequest,
    "Publish": types.PublishRequest,
}
LARGE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class PubSubAnswers(grpc.GenericRpcHandler):
    """Passes requests on, as bytes."""

    def __init__(self, server: str) -> None:
        self.address = ""
        self.asked: list[tuple[str, Any]] = []
        """Every request: the method, and what it says."""
        self.refusals: dict[str, tuple[grpc.StatusCode, str, bytes]] = {}
        """Methods that are refused: with the code, its words, and details."""
        self.lost: set[str] = set()
        """Methods whose next answer is lost, though the server carries out the request."""
        self.side_by_side = 0
        """The most pulls that were under way at the same time."""
        self._pulls = 0
        self._channel = grpc.aio.insecure_channel(server, options=LARGE)

    def of(self, method: str) -> list[Any]:
        return [asked for one, asked in self.asked if one == method]

    def refuse(
        self, method: str, code: grpc.StatusCode, words: str = "words of the service", details: bytes = b""
    ) -> None:
        self.refusals[method] = (code, words, details)

    def service(self, handler_call_details: Any) -> Any:
        path = handler_call_details.method

        async def serve(request: bytes, context: Any) -> bytes:
            method = path.rpartition("/")[2]
            self.asked.append((method, REQUESTS[method].pb().FromString(request)))
            if method in self.refusals:
                code, words, details = self.refusals[method]
                await context.abort(code, words, (("grpc-status-details-bin", details),) if details else ())
            self._pulls += method == "Pull"
            self.side_by_side = max(self.side_by_side, self._pulls)
            try:
                answer: bytes = await self._channel.unary_unary(path)(request)
            finally:
                self._pulls -= method == "Pull"
            if method in self.lost:
                self.lost.remove(method)
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection was lost")
            return answer

        return grpc.unary_unary_rpc_method_handler(serve)

    async def close(self) -> None:
        await self._channel.close()


@asynccontextmanager
async def pubsub_answers(server: str) -> AsyncIterator[PubSubAnswers]:
    """A new proxy on a free port of this machine."""
    proxy = PubSubAnswers(server)
    serving = grpc.aio.server(options=LARGE)
    serving.add_generic_rpc_handlers((proxy,))
    proxy.address = f"127.0.0.1:{serving.add_insecure_port('127.0.0.1:0')}"
    await serving.start()
    try:
        yield proxy
    finally:
        await serving.stop(None)
        await proxy.close()
        # A handler that was broken off ends in the next turns of the loop.
        await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0.01)
