"""A proxy in front of ElasticMQ: it answers as Amazon SQS does where ElasticMQ is lenient, and notes what is asked."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from keywise.core.clock import boot_time

VISIBILITY_MAX_S = 43_200
TOO_LATE = "does not exist or is not available for visibility timeout change."
TOO_LONG = "Total VisibilityTimeout for the message is beyond the limit [43200 seconds]"

Asked = dict[str, Any]


class AwsAnswers:
    """Passes requests on. A late extension, one beyond twelve hours and an empty batch are refused, as AWS does it."""

    def __init__(self, server_url: str) -> None:
        self.port = 0
        self.asked: list[tuple[str, Asked]] = []
        """Every request: the action, and what it says."""
        self.denied: set[str] = set()
        """Actions that the caller has no right to."""
        self.failing: set[str] = set()
        """Actions of which every entry fails, by a fault of the service."""
        self.odd: dict[str, tuple[int, bytes]] = {}
        """Actions that get this status and body in place of an answer, as from a gateway."""
        self.receives_to_hang = 0
        """So many receives get no answer."""
        self.hanging = 0
        """How many of them are under way."""
        self.false_zeros = 0
        """So many times the counts of a queue are answered as zero."""
        self.side_by_side = 0
        """The most requests that were under way at the same time."""
        self._under_way = 0
        self._server_url = server_url
        self._receives: Counter[str] = Counter()
        self._hidden_until: dict[str, float] = {}
        self._received_at: dict[str, float] = {}
        self._session: aiohttp.ClientSession | None = None

    def of(self, action: str) -> list[Asked]:
        return [asked for one, asked in self.asked if one == action]

    def receives_of(self, queue: str) -> int:
        """How many messages of a queue were handed over, one that came twice counted twice."""
        return self._receives[queue]

    def is_expired(self, receipt: str) -> bool:
        """Whether the visibility timeout of a delivery is over, as AWS sees it."""
        return self._hidden_until.get(receipt, 0.0) <= boot_time()

    def forget_receipts(self) -> None:
        """Refuse to extend what was received until now, as if the messages had become visible."""
        self._hidden_until.clear()

    async def serve(self, request: web.Request) -> web.Response:
        action = request.headers.get("X-Amz-Target", "").rpartition(".")[2]
        asked: Asked = json.loads(await request.read())
        self.asked.append((action, asked))
        if action in self.odd:
            status, body = self.odd[action]
            return web.Response(status=status, body=body, content_type="application/x-amz-json-1.0")
        if action == "ReceiveMessage" and self.receives_to_hang:
            await self._hang()
        if action in self.denied:
            return _refused(403, "AccessDenied", f"User is not authorized to perform: sqs:{action}")
        if action == "SendMessageBatch" and not asked["Entries"]:
            return _refused(400, "AWS.SimpleQueueService.EmptyBatchRequest", "There should be at least one entry")
        if action in self.failing:
            failed = [{"Id": one["Id"], "SenderFault": False, "Code": "InternalError"} for one in asked["Entries"]]
            return web.json_response({"Failed": failed}, content_type="application/x-amz-json-1.0")
        late: list[dict[str, Any]] = []
        if action == "ChangeMessageVisibilityBatch":
            late = [one for entry in asked["Entries"] if (one := self._judge(entry)) is not None]
            refused = {one["Id"] for one in late}
            asked["Entries"] = [entry for entry in asked["Entries"] if entry["Id"] not in refused]
        answer = await self._forward(request, asked) if asked.get("Entries", True) else {"Successful": []}
        if isinstance(answer, web.Response):
            return answer
        return web.json_response(self._as_aws(action, asked, answer, late), content_type="application/x-amz-json-1.0")

    async def _hang(self) -> None:
        self.receives_to_hang -= 1
        self.hanging += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.hanging -= 1

    def _judge(self, entry: dict[str, Any]) -> dict[str, Any] | None:
        now, receipt, wanted_s = boot_time(), entry["ReceiptHandle"], entry["VisibilityTimeout"]
        if self.is_expired(receipt):
            return _failed(entry, f"Value {receipt} for parameter ReceiptHandle is invalid. Reason: Message {TOO_LATE}")
        if wanted_s > VISIBILITY_MAX_S or now + wanted_s > self._received_at[receipt] + VISIBILITY_MAX_S:
            return _failed(entry, f"Value {wanted_s} for parameter VisibilityTimeout is invalid. Reason: {TOO_LONG}")
        self._hidden_until[receipt] = now + wanted_s
        return None

    def _as_aws(self, action: str, asked: Asked, answer: Any, late: list[dict[str, Any]]) -> Any:
        if action == "ReceiveMessage":
            now = boot_time()
            for message in answer.get("Messages", ()):
                self._receives[asked["QueueUrl"].rpartition("/")[2]] += 1
                self._received_at[message["ReceiptHandle"]] = now
                self._hidden_until[message["ReceiptHandle"]] = now + asked["VisibilityTimeout"]
        elif action == "ChangeMessageVisibilityBatch":
            answer["Failed"] = answer.get("Failed", []) + late
        elif action == "DeleteMessageBatch":
            # A standard queue says yes to any receipt.
            answer = {"Successful": [{"Id": entry["Id"]} for entry in asked["Entries"]], "Failed": []}
        elif action == "GetQueueAttributes" and self.false_zeros:
            self.false_zeros -= 1
            counts = {name: "0" for name in answer["Attributes"] if name.startswith("Approximate")}
            answer["Attributes"] |= counts
        return answer

    async def _forward(self, request: web.Request, asked: Asked) -> Any:
        assert self._session is not None
        kept = {"Content-Type", "X-Amz-Target", "Authorization", "X-Amz-Date"}
        headers = {name: value for name, value in request.headers.items() if name in kept}
        self._under_way += 1
        self.side_by_side = max(self.side_by_side, self._under_way)
        try:
            async with self._session.post(self._server_url, data=json.dumps(asked), headers=headers) as answer:
                body = await answer.read()
        finally:
            self._under_way -= 1
        if answer.status >= 300:
            return web.Response(status=answer.status, body=body, headers={"Content-Type": "application/json"})
        return json.loads(body or b"{}")

    @asynccontextmanager
    async def running(self) -> AsyncIterator["AwsAnswers"]:
        # A long poll ends here when the client breaks it off; otherwise the proxy would wait for it at its own end.
        runner = web.ServerRunner(web.Server(self.serve, handler_cancellation=True))
        async with aiohttp.ClientSession() as self._session:
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.port = runner.addresses[0][1]
            try:
                yield self
            finally:
                await runner.cleanup()


def aws_answers(server_url: str) -> AbstractAsyncContextManager[AwsAnswers]:
    """A new proxy on a free port of this machine."""
    return AwsAnswers(server_url).running()


def _failed(entry: dict[str, Any], message: str) -> dict[str, Any]:
    return {"Id": entry["Id"], "SenderFault": True, "Code": "InvalidParameterValue", "Message": message}


def _refused(status: int, code: str, message: str) -> web.Response:
    body = {"__type": f"com.amazonaws.sqs#{code.rpartition('.')[2]}", "message": message}
    headers = {"x-amzn-query-error": f"{code};Sender"}
    return web.json_response(body, status=status, headers=headers, content_type="application/x-amz-json-1.0")
