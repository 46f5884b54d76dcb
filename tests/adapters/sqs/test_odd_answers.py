"""Answers that are not from SQS, and answers that never come: nothing counts as done, and nothing else waits."""

import json

import pytest

from adapters.sqs.benches import created, fresh, source_at
from adapters.sqs.waiting import received
from keywise.core.errors import UnavailableError
from running import awaited
from servers import shared
from servers.aws_answers import aws_answers

pytestmark = pytest.mark.server("elasticmq")

MESSAGE = {"MessageId": "m", "ReceiptHandle": "r", "Body": "b"}
ODD = {
    "a page": (200, b"<html>log in</html>"),
    "nothing": (200, b""),
    "half": (200, b'{"Messages":[{"Mess'),
    "not UTF-8": (200, b'{"Messages": "\xff\xfe"}'),
    "a list": (200, b"[]"),
    "null": (200, b"null"),
    "deep": (200, b"[" * 100_000),
    "a page of a gateway": (403, b"<html>denied</html>"),
    "a page in Latin-1": (403, b"<html>d\xe9nied</html>"),
    "an error as a list": (503, b"[1]"),
    "an error with a number": (400, b'{"__type": 5}'),
}


@pytest.mark.parametrize("odd", ODD)
@awaited
async def test_an_answer_that_is_not_from_sqs_confirms_nothing(odd):
    queue = created(shared.elasticmq(), fresh("odd"))
    async with aws_answers(shared.elasticmq().url) as aws, source_at(aws.port, queue) as source:
        await source.send([b"one"])
        held = await received(source, 1)
        actions = ("SendMessageBatch", "ChangeMessageVisibilityBatch", "DeleteMessageBatch", "GetQueueAttributes")
        aws.odd = dict.fromkeys(actions, ODD[odd])
        for request in (source.send([b"two"]), source.extend(held, 60.0), source.ack(held), source.backlog()):
            with pytest.raises(UnavailableError):
                await request
        aws.odd.clear()
        await source.ack(held)
        assert await source.depth() == 0, "the second message was not sent, and that was reported"


@pytest.mark.parametrize("message", [None, {}, MESSAGE, {**MESSAGE, "Attributes": {"SentTimestamp": "soon"}}])
@awaited
async def test_a_message_without_what_sqs_promises_is_an_outage(message):
    queue = created(shared.elasticmq(), fresh("odd"))
    async with aws_answers(shared.elasticmq().url) as aws, source_at(aws.port, queue) as source:
        aws.odd["ReceiveMessage"] = (200, json.dumps({"Messages": [message]}).encode())
        with pytest.raises(UnavailableError):
            await source.receive(10, 0.0)


@awaited
async def test_a_receive_that_hangs_does_not_hold_back_what_the_others_bring():
    queue = created(shared.elasticmq(), fresh("hung"))
    async with aws_answers(shared.elasticmq().url) as aws, source_at(aws.port, queue) as source:
        await source.send([b"one"] * 300)
        await received(source, 100)
        assert aws.side_by_side > 1
        aws.receives_to_hang = 1
        assert await source.receive(100, 1.0)
        assert aws.hanging == 1, "the request is still under way"


@awaited
async def test_a_long_poll_is_as_short_as_the_visibility_timeout():
    """If its connection falls silent, messages wait for it."""
    queue = created(shared.elasticmq(), fresh("quiet"))
    async with aws_answers(shared.elasticmq().url) as aws, source_at(aws.port, queue, visibility_s=3.0) as source:
        assert await source.receive(10, 0.1) == []
        assert [asked["WaitTimeSeconds"] for asked in aws.of("ReceiveMessage")] == [3]
