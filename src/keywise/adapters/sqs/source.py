"""A queue of Amazon SQS, standard or FIFO, consumed as it is.

A message is hidden for the visibility timeout, which is extended as long as a worker holds the message.
SQS ends that after twelve hours, and moves a message to a dead-letter queue if it was received too often. So the source
sends a copy before that, and deletes the original when SQS has confirmed the copy.
"""

import asyncio
import json
import math
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import msgspec

from keywise.adapters.aws.errors import aws_errors, error_code, refusal_of
from keywise.adapters.aws.service import ANSWER_S, Answer, AwsService
from keywise.adapters.sqs.batches import RequestLimit, batches, numbered, sized_batches
from keywise.adapters.sqs.errors import RIGHTS, SQS_CODES, failed_entries
from keywise.adapters.sqs.messages import (
    READ_ATTRIBUTES,
    OutgoingMessage,
    SqsDelivery,
    copied_message,
    delivery_of,
    fresh_message,
    is_group,
)
from keywise.adapters.sqs.polls import Polls
from keywise.adapters.sqs.service import LONG_POLL_S, OPTIONS, service_at
from keywise.core.change import Delivery
from keywise.core.errors import AddressError, DatabaseError, KeywiseError, UnavailableError
from keywise.core.settings import seconds
from keywise.core.source import VISIBILITY_S, Backlog, Source, visibility_of
from keywise.core.url import Address, redacted

VISIBILITY_MAX_S = 43_200
"""SQS hides a message for twelve hours after a receive at the most, however often that is extended."""
HELD_MAX_S = 39_600.0
"""A message that is held for so long (11 h) is copied, before SQS would give it to another consumer."""
DELAY_MAX_S = 900
"""The longest that SQS delays a new message; the source waits for the rest."""
RENEWED_S = 1
"""Delay of a copy of a message that is being processed, so that original and copy do not come together."""
COPIES_MAX = 20
RECEIVES_ENOUGH = 4
REQUESTS, REQUESTS_MAX = 16, 100
MESSAGE_MAX_BYTES, BATCH_MIN_BYTES = 1_048_576, 262_144
"""What SQS takes at the most in a message and in a batch; and what it takes in a batch of any queue."""
RECEIVE_MIN_S = 2.0
"""A receive waits for its answer for as long as a visibility timeout, but not for less than this."""
SETTLED_S = 60.0
"""The counts of SQS are approximate; a minute after the last message was sent, they are right."""
COPIED_MAX = 10_000
COUNTS = ("ApproximateNumberOfMessages", "ApproximateNumberOfMessagesDelayed", "ApproximateNumberOfMessagesNotVisible")

_QUEUE = re.compile(r"[A-Za-z0-9_-]{1,80}|[A-Za-z0-9_-]{1,75}\.fifo")
_ACCOUNT = re.compile(r"\d{12}")


class SqsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a URL says about how to use a queue."""

    visibility_s: float | None = None
    """None: as long as a lease."""
    requests: int = REQUESTS
    """The most receives side by side, and the most other requests."""
    copies_max: int = COPIES_MAX
    settled_s: float = SETTLED_S
    held_max_s: float = HELD_MAX_S


class SqsSource:
    """One queue of SQS."""

    database: object | None = None

    def __init__(
        self, service: AwsService, queue: str, account: str = "", settings: "SqsSettings | None" = None
    ) -> None:
        self._settings = settings or SqsSettings()
        self.visibility_s = _whole(self._settings.visibility_s or VISIBILITY_S)
        self._service = service
        self._queue = queue
        self._account = account
        self._is_fifo = queue.endswith(".fifo")
        self._queue_url = ""
        self._message_max_bytes = MESSAGE_MAX_BYTES
        self._renew_from: int | None = None
        """A message that was received so often is copied; None: SQS never moves it."""
        self._limit = RequestLimit(self._settings.requests)
        self._polls = Polls(self._ask, self._return, self._settings.requests, self.visibility_s)
        self._copied: OrderedDict[str | int, None] = OrderedDict()
        """Receipts of deliveries that a worker still holds, though their messages were copied and deleted."""
        self._empty_since: float | None = None

    def follow_lease(self, lease_s: float, runtime_max_s: float) -> None:
        if self._settings.visibility_s is None:
            self.visibility_s = _whole(lease_s)
            self._polls.follow_visibility(self.visibility_s)

    async def __aenter__(self) -> Self:
        await self._service.open(2 * self._settings.requests + 2, LONG_POLL_S + ANSWER_S)
        try:
            self._queue_url = await self._found_queue()
            await self._read_counts()
            if self._renew_from is not None:
                await self._check_right_to_send()
        except BaseException:
            await self._service.close()
            raise
        self._service.started()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._polls.close()
        await self._service.close()

    async def receive(self, limit: int, wait_s: float) -> Sequence[Delivery]:
        deliveries = await self._polls.receive(limit, wait_s)
        if not any(map(self._is_unfit, deliveries)):
            return deliveries
        try:
            return await self._without_unfit(deliveries)
        except asyncio.CancelledError:
            self._polls.put_back(deliveries)
            raise

    async def extend(self, deliveries: Sequence[Delivery], visibility_s: float) -> Sequence[Delivery]:
        """SQS refuses to extend a delivery whose visibility timeout is over, also if no other consumer has it yet.

        A message that was copied is not refused: its worker goes on, and the copy waits until the key is free.
        """
        now = asyncio.get_running_loop().time()
        old = [
            one
            for one in deliveries
            if isinstance(one, SqsDelivery) and now - one.received_at >= self._settings.held_max_s
        ]
        if old := [one for one in old if one.receipt not in self._copied and self._may_copy(one)]:
            for one in await self._copy(old, RENEWED_S):
                self._copied[one.receipt] = None
                if len(self._copied) > COPIED_MAX:
                    self._copied.popitem(last=False)
        return await self._hide([one for one in deliveries if one.receipt not in self._copied], visibility_s)

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        entries = [{"ReceiptHandle": one.receipt} for one in deliveries]
        await self._change(deliveries, entries, self._service.client.delete_message_batch)

    async def release(self, deliveries: Sequence[Delivery], delay_s: float) -> None:
        await self._hide(deliveries, delay_s)

    async def send(self, bodies: Sequence[bytes], *, delay_s: float = 0.0) -> None:
        whole = _whole(delay_s)
        is_kept_by_sqs = whole <= DELAY_MAX_S and not self._is_fifo
        messages = [fresh_message(body, delay_s=0.0 if is_kept_by_sqs else delay_s) for body in bodies]
        await self._send(messages, min(whole, DELAY_MAX_S))

    async def send_again(self, body: bytes, headers: Mapping[str, str], routing_key: str) -> None:
        await self._send([fresh_message(body, headers)], 0, [routing_key])

    async def depth(self) -> int:
        """What SQS counts, which is approximate: visible, delayed and delivered messages."""
        return sum(await self._read_counts())

    async def backlog(self) -> Backlog:
        """Zero is believed only if SQS has reported it for a while."""
        counts, now = await self._read_counts(), asyncio.get_running_loop().time()
        if sum(counts):
            self._empty_since = None
            return Backlog(sum(counts), held=counts[-1], unsure_s=self._settings.settled_s)
        if self._empty_since is None:
            self._empty_since = now
        return Backlog(0, held=0, unsure_s=max(0.0, self._settings.settled_s - (now - self._empty_since)))

    # Opening.

    async def _found_queue(self) -> str:
        if self._account:
            return f"{self._service.endpoint}/{self._account}/{self._queue}"
        answer = await self._service.answered(self._service.client.get_queue_url(QueueName=self._queue))
        return str(answer["QueueUrl"])

    async def _read_counts(self) -> list[int]:
        """Return the counts of the queue, and read its limits: an owner may change them at any time."""
        asked = self._service.client.get_queue_attributes(QueueUrl=self._queue_url, AttributeNames=["All"])
        attributes = (await self._service.answered(asked)).get("Attributes", {})
        if missing := [name for name in COUNTS if name not in attributes]:
            raise UnavailableError(
                f"{self._service.name}: the answer has no {missing[0]}; check the host and the proxy"
            )
        self._message_max_bytes = int(attributes.get("MaximumMessageSize", MESSAGE_MAX_BYTES))
        self._renew_from = self._renewing_from(attributes.get("RedrivePolicy"))
        return [int(attributes.get(name, 0)) for name in COUNTS]

    def _renewing_from(self, policy: str | None) -> int | None:
        """At which receive a message has to be copied: one before the last, if that leaves two hand-overs."""
        if not policy or self._settings.copies_max == 0:
            return None
        receives_max = int(json.loads(policy).get("maxReceiveCount", VISIBILITY_MAX_S))
        if receives_max <= 1:
            raise DatabaseError(
                f"{self._service.name}: the redrive policy of the queue has maxReceiveCount={receives_max}, so a "
                f"message whose worker is restarted goes to the dead-letter queue; raise it to {RECEIVES_ENOUGH} or "
                "more, or accept that with copies=0 in the URL"
            )
        return receives_max - 1 if receives_max >= RECEIVES_ENOUGH else receives_max

    async def _check_right_to_send(self) -> None:
        """An empty batch sends nothing; a user without the right to send is refused all the same."""
        client, url = self._service.client, self._queue_url
        try:
            await self._service.answered(client.send_message_batch(QueueUrl=url, Entries=[]))
        except DatabaseError as error:
            if (refusal := refusal_of(error)) is not None and error_code(refusal) == "AccessDenied":
                raise DatabaseError(
                    f"{self._service.name}: the queue has a redrive policy, so keywise has to send copies of messages "
                    f"that come often; allow {RIGHTS} on the queue, or add copies=0 to the URL"
                ) from error

    # Receiving.

    async def _ask(self, limit: int, wait_s: int) -> list[SqsDelivery]:
        asked = self._service.client.receive_message(
            QueueUrl=self._queue_url,
            MaxNumberOfMessages=limit,
            VisibilityTimeout=self.visibility_s,
            WaitTimeSeconds=wait_s,
            MessageSystemAttributeNames=READ_ATTRIBUTES,
            MessageAttributeNames=["All"],
        )
        # A receive that gets no answer must not keep the other keys waiting for long.
        answer = await self._service.answered(asked, wait_s + min(ANSWER_S, max(RECEIVE_MIN_S, self.visibility_s)))
        if not (messages := answer.get("Messages")):
            return []
        now, date = asyncio.get_running_loop().time(), answer["ResponseMetadata"]["HTTPHeaders"].get("date", "")
        with aws_errors(self._service.name, SQS_CODES):
            return [delivery_of(message, now, date) for message in messages]

    def _is_unfit(self, delivery: SqsDelivery) -> bool:
        return delivery.due_s > 0 or self._is_worn(delivery)

    async def _without_unfit(self, deliveries: Sequence[SqsDelivery]) -> list[SqsDelivery]:
        """Copy what SQS would soon move to the dead-letter queue, and put off what came too early."""
        worn = [one for one in deliveries if self._is_worn(one) and self._may_copy(one)]
        try:
            gone = {one.receipt for one in await self._copy(worn, 0)} if worn else set()
        except (DatabaseError, UnavailableError):
            # They are handed over as they are, which is better than not at all.
            gone = set()
        early = [one for one in deliveries if one.due_s > 0 and one.receipt not in gone]
        for one in early:
            await self._hide([one], one.due_s)
        gone.update(one.receipt for one in early)
        return [one for one in deliveries if one.receipt not in gone]

    def _is_worn(self, delivery: SqsDelivery) -> bool:
        return self._renew_from is not None and delivery.receives >= self._renew_from

    def _may_copy(self, delivery: SqsDelivery) -> bool:
        copies = delivery.note.copies if delivery.note is not None else 0
        return copies < self._settings.copies_max

    async def _return(self, deliveries: Sequence[SqsDelivery]) -> None:
        await self._hide(deliveries, 0.0)

    # Changing.

    async def _hide(self, deliveries: Sequence[Delivery], visibility_s: float) -> list[Delivery]:
        """Hide deliveries for so long from now, but never for longer than SQS allows. Return those that SQS refused."""
        now, whole, entries = asyncio.get_running_loop().time(), _whole(visibility_s), list[dict[str, Any]]()
        for one in deliveries:
            age_s = now - one.received_at if isinstance(one, SqsDelivery) else 0.0
            left_s = max(0, int(VISIBILITY_MAX_S - age_s) - 1)
            entries.append({"ReceiptHandle": one.receipt, "VisibilityTimeout": min(whole, left_s)})
        return await self._change(deliveries, entries, self._service.client.change_message_visibility_batch)

    async def _change(
        self, deliveries: Sequence[Delivery], entries: Sequence[dict[str, Any]], request: Callable[..., Any]
    ) -> list[Delivery]:
        """Change messages by their receipts. Return those that came back, which SQS refuses to change."""
        if not entries:
            return []
        failed, refused = list[Mapping[str, Any]](), list[Delivery]()

        async def change(batch: Sequence[tuple[Delivery, dict[str, Any]]]) -> None:
            asked = request(QueueUrl=self._queue_url, Entries=numbered([entry for _, entry in batch]))
            failures = failed_entries(await self._service.answered(asked), len(batch))
            failed.extend(one for one in failures if not one.get("SenderFault"))
            places = {one.get("Id") for one in failures if one.get("SenderFault")}
            refused.extend(delivery for place, (delivery, _) in enumerate(batch) if str(place) in places)

        pairs = [*zip(deliveries, entries, strict=True)]
        await self._limit.run([partial(change, batch) for batch in batches(pairs)])
        if failed:
            raise self._unavailable(failed)
        return refused

    # Sending.

    async def _send(self, messages: Sequence[OutgoingMessage], delay_s: int, groups: Sequence[str] = ()) -> None:
        for message in messages:
            if message.size > self._message_max_bytes:
                raise DatabaseError(
                    f"{self._service.name}: a message of {message.size} bytes is above the limit of the queue, which "
                    f"is {self._message_max_bytes}; store the content elsewhere and send where it is"
                )
        prefix = secrets.token_hex(8)
        groups = groups or [""] * len(messages)
        addressed = [
            self._addressed(message, f"{prefix}.{number}", group, delay_s)
            for number, (message, group) in enumerate(zip(messages, groups, strict=True))
        ]
        if (error := (await self._put(addressed))[1]) is not None:
            raise error

    def _addressed(self, message: OutgoingMessage, id: str, group: str, delay_s: int) -> OutgoingMessage:
        """Add what a FIFO queue needs. Without a group, a message is alone in its own, and waits for no other."""
        if self._is_fifo:
            message.entry["MessageGroupId"] = group if is_group(group) else f"keywise.{id}"
            message.entry["MessageDeduplicationId"] = f"keywise.{id}"
        else:
            if delay_s:
                message.entry["DelaySeconds"] = delay_s
            if is_group(group):
                message.entry["MessageGroupId"] = group
        return message

    async def _copy(self, deliveries: Sequence[SqsDelivery], delay_s: int) -> list[SqsDelivery]:
        """Send copies, and delete the originals of those that SQS has confirmed. Return these originals.

        A copy that is too large for SQS is not sent. The deduplication id is the same if a copy is repeated.
        """
        sent, messages = list[SqsDelivery](), list[OutgoingMessage]()
        for one in deliveries:
            message = copied_message(one, one.due_s)
            if message.size <= self._message_max_bytes:
                number = one.note.copies + 1 if one.note is not None else 1
                sent.append(one)
                messages.append(self._addressed(message, f"{one.id}.{number}", one.routing_key, delay_s))
        places, error = await self._put(messages)
        confirmed = [sent[place] for place in places]
        # Also if others failed: SQS has these.
        await self.ack(confirmed)
        if error is not None:
            raise error
        return confirmed

    async def _put(self, messages: Sequence[OutgoingMessage]) -> tuple[list[int], KeywiseError | None]:
        """Send messages. Return the places of those that SQS has confirmed, and the first error."""
        if not messages:
            return [], None
        confirmed, failed = list[int](), list[Mapping[str, Any]]()

        async def put(start: int, batch: Sequence[OutgoingMessage]) -> None:
            entries = numbered([message.entry for message in batch])
            client = self._service.client
            answer: Answer = await self._service.answered(
                client.send_message_batch(QueueUrl=self._queue_url, Entries=entries)
            )
            confirmed.extend(start + int(one["Id"]) for one in answer.get("Successful", ()))
            failed.extend(failed_entries(answer, len(batch)))

        parts = sized_batches(messages, max(BATCH_MIN_BYTES, self._message_max_bytes))
        try:
            await self._limit.run([partial(put, start, batch) for start, batch in parts])
        except (DatabaseError, UnavailableError) as error:
            return confirmed, error
        if not failed:
            return confirmed, None
        refused = [one for one in failed if one.get("SenderFault")]
        if refused:
            said = refused[0].get("Message") or refused[0].get("Code")
            return confirmed, DatabaseError(f"{self._service.name}: SQS refused {len(refused)} messages: {said}")
        return confirmed, self._unavailable(failed)

    def _unavailable(self, failed: Sequence[Mapping[str, Any]]) -> UnavailableError:
        said = failed[0].get("Message") or failed[0].get("Code")
        return UnavailableError(f"{self._service.name}: SQS failed on {len(failed)} messages: {said}")


def connect(address: Address) -> Source:
    """`sqs://sqs.REGION.amazonaws.com/ACCOUNT/QUEUE`; the queue is named like the pipeline by default."""
    options = address.take("visibility", "requests", "copies", "settled", *OPTIONS)
    url, service = redacted(address.url), service_at(address, options)
    account, queue = _place(address)
    visibility_s = visibility_of(options)
    if visibility_s is not None and not 1 <= visibility_s <= VISIBILITY_MAX_S:
        raise AddressError(f"{url}: visibility={options['visibility']} has to be from 1s to 12h")
    settings = SqsSettings(
        visibility_s=visibility_s,
        requests=_number(url, options, "requests", REQUESTS, range(1, REQUESTS_MAX + 1)),
        copies_max=_number(url, options, "copies", COPIES_MAX, range(COPIES_MAX + 1)),
        settled_s=seconds(options.get("settled", SETTLED_S)),
    )
    return SqsSource(service, queue, account, settings)


def _place(address: Address) -> tuple[str, str]:
    """The account and the queue of a URL; the account is empty if it is the caller's own."""
    parts = [part for part in address.path.split("/") if part]
    account = parts.pop(0) if parts and _ACCOUNT.fullmatch(parts[0]) else ""
    if len(parts) > 1:
        raise AddressError(f"{redacted(address.url)}: write the path as /ACCOUNT/QUEUE, with an account of 12 digits")
    queue = parts[0] if parts else address.name
    if not _QUEUE.fullmatch(queue):
        raise AddressError(
            f"{redacted(address.url)}: {queue!r} is no name of a queue, which has up to 80 letters, digits, - and _, "
            "and ends with .fifo if it is a FIFO queue"
        )
    return account, queue


def _number(url: str, options: Mapping[str, str], name: str, default: int, allowed: range) -> int:
    given = options.get(name, str(default))
    if not given.isdecimal() or int(given) not in allowed:
        raise AddressError(f"{url}: {name}={given} has to be a whole number from {allowed[0]} to {allowed[-1]}")
    return int(given)


def _whole(duration_s: float) -> int:
    """SQS knows whole seconds only; part of one is rounded up, so that nothing comes too early."""
    return min(VISIBILITY_MAX_S, max(0, math.ceil(duration_s)))
