"""Where AWS is stricter than ElasticMQ: late extensions, the limit of twelve hours, redrive policies, rights."""

import json

import pytest

from adapters.sqs.benches import created, fresh, source_at
from adapters.sqs.waiting import bodies_of, received, until
from flow.rig import Rig
from keywise.adapters.sqs.source import VISIBILITY_MAX_S
from keywise.core.change import Change, Outcome, order_of
from keywise.core.clock import boot_time
from keywise.core.errors import DatabaseError, UnavailableError
from keywise.flow.lanes import Lanes, Ticket
from keywise.flow.settlement import Settlement
from running import awaited
from servers import shared
from servers.aws_answers import AwsAnswers, aws_answers
from servers.fault_proxy import fault_proxy

pytestmark = pytest.mark.server("elasticmq")


def redriven(receives_max: int, ending: str = "") -> tuple[str, str]:
    """A queue that moves messages to a dead-letter queue, and the name of that."""
    server, dead = shared.elasticmq(), fresh("dead") + ending
    created(server, dead)
    arn = f"arn:aws:sqs:elasticmq:000000000000:{dead}"
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": receives_max})
    return created(server, fresh("redriven") + ending, RedrivePolicy=policy), dead


def timeouts(aws: AwsAnswers) -> list[int]:
    return [
        entry["VisibilityTimeout"] for asked in aws.of("ChangeMessageVisibilityBatch") for entry in asked["Entries"]
    ]


@awaited
async def test_a_refused_extension_does_nothing_and_the_next_receipt_counts():
    queue = created(shared.elasticmq(), fresh("late"))
    async with aws_answers(shared.elasticmq().url) as aws, source_at(aws.port, queue, visibility_s=1.0) as source:
        await source.send([b"one"])
        [old] = await received(source, 1)
        [new] = await received(source, 1)
        assert (new.id, new.count) == (old.id, 2) and new.receipt != old.receipt
        assert await source.extend([old], 60.0) == [old]
        await source.ack([old])
        assert await source.depth() == 1
        await source.ack([new])
        assert await source.depth() == 0


@awaited
async def test_an_extension_after_the_visibility_timeout_is_refused_also_if_no_other_consumer_has_the_message():
    queue = created(shared.elasticmq(), fresh("expired"))
    async with (
        aws_answers(shared.elasticmq().url) as aws,
        source_at(aws.port, queue, visibility_s=900.0) as source,
    ):
        await source.send([b"%d" % number for number in range(15)])
        held = await received(source, 15)
        await source.send([b"late"])
        async with source_at(aws.port, queue, visibility_s=1.0) as brief:
            [late] = await received(brief, 1)
        await until(lambda: aws.is_expired(str(late.receipt)))
        assert await source.extend([*held[:12], late, *held[12:]], 900.0) == [late]
        [again] = await received(source, 1)
        assert (again.id, await source.extend([again], 900.0)) == (late.id, [])


@awaited
async def test_the_ticket_of_a_message_that_came_back_is_orphaned_until_its_worker_receives_it_again():
    queue, lanes, rig = created(shared.elasticmq(), fresh("orphaned")), Lanes(10), Rig()
    async with (
        aws_answers(shared.elasticmq().url) as aws,
        source_at(aws.port, queue, visibility_s=900.0) as source,
    ):
        rig.more = {"sources": [("queue", source)], "clock": boot_time}
        settlement = Settlement(rig.pipeline())
        await source.send([b"one"])
        async with source_at(aws.port, queue, visibility_s=1.0) as brief:
            lanes.add([Ticket(Change("a", order_of(1)), one) for one in await received(brief, 1)])
        [ticket] = lanes.tickets()
        await until(lambda: aws.is_expired(str(ticket.delivery.receipt)))
        await settlement.extend([ticket], age=0.0)
        assert ticket.is_orphaned
        lanes.add([Ticket(Change("a", order_of(1)), one) for one in await received(source, 1)])
        assert (lanes.tickets(), ticket.is_orphaned, ticket.delivery.count) == ([ticket], False, 2)
        await settlement.extend([ticket], age=0.0)
        assert not ticket.is_orphaned
        await settlement.settle([(ticket, Outcome.APPLIED)])
        assert await source.depth() == 0


@awaited
async def test_what_sqs_itself_fails_on_is_an_outage_and_not_a_refusal():
    queue = created(shared.elasticmq(), fresh("failing"))
    async with aws_answers(shared.elasticmq().url) as aws, source_at(aws.port, queue) as source:
        await source.send([b"one"])
        held = await received(source, 1)
        aws.failing |= {"SendMessageBatch", "ChangeMessageVisibilityBatch", "DeleteMessageBatch"}
        for request in (source.send([b"two"]), source.extend(held, 60.0), source.release(held, 0.0), source.ack(held)):
            with pytest.raises(UnavailableError, match=r"SQS failed on 1 messages: InternalError"):
                await request
        aws.failing.clear()
        await source.ack(held)
        assert await source.depth() == 0


@awaited
async def test_an_extension_and_a_release_end_before_the_twelve_hours_of_sqs():
    queue = created(shared.elasticmq(), fresh("long"))
    async with aws_answers(shared.elasticmq().url) as aws, source_at(aws.port, queue) as source:
        await source.send([b"one", b"two"])
        held = await received(source, 2)
        await source.extend(held, 86_400.0)
        await source.release(held, 86_400.0)
        asked = timeouts(aws)
        assert len(asked) == 4 and all(VISIBILITY_MAX_S - 600 < one < VISIBILITY_MAX_S for one in asked)
        assert await source.receive(10, 0.0) == [], "AWS refused, so the messages came back"


@awaited
async def test_a_message_that_is_held_for_hours_is_copied_once_and_comes_again_under_its_id():
    queue = created(shared.elasticmq(), fresh("held"))
    async with (
        aws_answers(shared.elasticmq().url) as aws,
        source_at(aws.port, queue, held_max_s=0.0) as source,
    ):
        await source.send_again(b"\xff", {"sender": "cms"}, "g")
        [held] = await received(source, 1)
        for _ in range(3):
            assert await source.extend([held], 60.0) == [], "its worker goes on"
        assert len(aws.of("SendMessageBatch")) == 2
        assert timeouts(aws) == []
        [copy] = await received(source, 1)
        assert (copy.id, copy.body, copy.sent_at, copy.routing_key) == (held.id, b"\xff", held.sent_at, "g")
        assert (copy.count, copy.headers) == (2, {"sender": "cms"})
        await source.ack([held])
        assert await source.depth() == 1, "the original is gone, and its receipt with it"
        await source.ack([copy])
        assert await source.depth() == 0


@pytest.mark.parametrize("ending", ["", ".fifo"])
@awaited
async def test_a_redrive_policy_does_not_take_a_message_that_workers_give_back(ending: str):
    """Received 30 times, where SQS allows three: it keeps its id and its time of sending, and the count goes on."""
    queue, dead = redriven(3, ending)
    async with source_at(shared.elasticmq().port, queue) as source:
        await source.send([b"one"])
        [first] = await received(source, 1)
        count = first.count
        await source.release([first], 0.0)
        for _ in range(30):
            [one] = await received(source, 1)
            assert (one.id, one.body, one.sent_at) == (first.id, b"one", first.sent_at)
            assert one.count > count
            count = one.count
            await source.release([one], 0.0)
        assert await source.depth() == 1
    async with source_at(shared.elasticmq().port, dead) as letters:
        assert await letters.depth() == 0


@awaited
async def test_after_twenty_copies_the_redrive_policy_is_left_to_itself():
    queue, dead = redriven(2)
    async with (
        aws_answers(shared.elasticmq().url) as aws,
        source_at(aws.port, queue, copies_max=3) as source,
        source_at(shared.elasticmq().port, dead) as letters,
    ):
        await source.send([b"one"])

        async def is_dead() -> bool:
            await source.release(await source.receive(10, 0.0), 0.0)
            return await letters.depth() == 1

        await until(is_dead)
        assert len(aws.of("SendMessageBatch")) == 2 + 3, "the check at the start, the message, and its copies"


@awaited
async def test_a_copy_that_cannot_be_sent_leaves_the_original_in_place():
    queue, _ = redriven(3)
    async with aws_answers(shared.elasticmq().url) as aws, source_at(aws.port, queue) as source:
        await source.send([b"one"])
        aws.denied.add("SendMessageBatch")
        for count in (1, 2, 3):
            [one] = await received(source, 1)
            assert (one.body, one.count) == (b"one", count)
            await source.release([one], 0.0)


@awaited
async def test_a_message_that_is_too_large_for_a_copy_is_handed_over_as_it_is():
    queue, _ = redriven(3)
    async with source_at(shared.elasticmq().port, queue) as source:
        await source.send([b"x" * (1 << 20)])
        for count in (1, 2, 3):
            [one] = await received(source, 1)
            assert (len(one.body), one.count) == (1 << 20, count)
            await source.release([one], 0.0)


@awaited
async def test_a_worker_without_the_right_to_send_copies_finds_out_at_the_start():
    queue, _ = redriven(5)
    async with aws_answers(shared.elasticmq().url) as aws:
        aws.denied.add("SendMessageBatch")
        with pytest.raises(DatabaseError, match=r"has a redrive policy.*allow sqs:ReceiveMessage.*or add copies=0"):
            await source_at(aws.port, queue).__aenter__()
        async with source_at(aws.port, queue, copies_max=0):
            pass
        plain = created(shared.elasticmq(), fresh("plain"))
        async with source_at(aws.port, plain) as source:
            assert await source.depth() == 0


@awaited
async def test_a_queue_that_allows_a_single_receive_is_refused():
    queue, _ = redriven(1)
    with pytest.raises(DatabaseError, match=r"maxReceiveCount=1.*raise it to 4 or more"):
        await source_at(shared.elasticmq().port, queue).__aenter__()
    async with source_at(shared.elasticmq().port, queue, copies_max=0) as source:
        await source.send([b"one"])
        assert bodies_of(await received(source, 1)) == [b"one"]


@awaited
async def test_a_copy_that_is_repeated_on_a_fifo_queue_is_there_once():
    """The answer to the first copy is lost, so the original is handed over once more, and copied again."""
    queue, dead = redriven(4, ".fifo")
    async with (
        fault_proxy(shared.elasticmq().port) as proxy,
        source_at(proxy.port, queue) as source,
        source_at(shared.elasticmq().port, dead) as letters,
    ):
        await source.send_again(b"one", {}, "g")
        for count in (1, 2):
            [held] = await received(source, 1)
            assert held.count == count
            await source.release([held], 0.0)
        proxy.lose_answer(b"SendMessageBatch")
        [held] = await received(source, 1)
        assert (held.count, proxy.pending) == (3, 0)
        await source.release([held], 0.0)
        [copy] = await received(source, 1)
        assert (copy.id, copy.body, copy.routing_key) == (held.id, b"one", "g")
        await source.ack([copy])
        assert (await source.depth(), await letters.depth()) == (0, 0)
