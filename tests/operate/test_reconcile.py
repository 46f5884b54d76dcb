"""A sink is compared with the source of truth: what counts as a difference, and what only happens meanwhile."""

import asyncio
import json
from typing import Any

import pytest

from causes import said
from flow.rig import LEASED, QUEUE_TRANSACTION, Rig, Running
from flow.test_consumer import page
from keywise.core.change import Change, ChangeHeader, order_of
from keywise.core.entry import EMPTY, Entry, LeaseTerms
from keywise.core.errors import SettingsError
from keywise.core.sink import Content
from keywise.operate.reconcile import LOOK_AGAIN_S, PAGE, Difference, Kind, Reconciler, difference, differing
from operate.admin_rig import Desk


class Archive(Rig):
    """A store, and a truth that a test decides."""

    def __init__(self, way: str = QUEUE_TRANSACTION) -> None:
        super().__init__(way)
        self.truth: dict[str, Any] = {}
        self.refetch = self.truth.get

    async def walk(self, *more: str) -> tuple[Reconciler, dict[str, Difference]]:
        walk = Reconciler(self.pipeline())
        return walk, {one.key: one async for one in walk.differences(more)}

    def kinds(self, *more: str) -> dict[str, Kind]:
        _, found = self.play(self.walk(*more))
        return {key: one.kind for key, one in found.items()}


@pytest.mark.parametrize("way", [QUEUE_TRANSACTION, LEASED])
def test_every_kind_of_difference_is_found(way):
    archive = Archive(way)
    keys = ("same", "lost", "stays", "old", "new", "odd", "gone")
    archive.run(*(page(key, 5) for key in keys))
    archive.truth |= {key: page(key, 5) for key in keys if key not in {"stays", "gone"}}
    archive.truth |= {"old": page("old", 6), "new": page("new", 4), "odd": page("odd", 5, text="else")}
    archive.truth["flagged"] = page("flagged", 1, gone=True)
    for key in ("lost", "gone"):
        archive.sink.stored.pop(key)
    assert archive.kinds() == {
        "lost": Kind.MISSING,
        "stays": Kind.EXTRA,
        "old": Kind.OLDER,
        "new": Kind.NEWER,
        "odd": Kind.DIFFERENT,
    }


def test_keys_that_the_ledger_does_not_know_can_be_given():
    archive = Archive()
    archive.run(page("a", 1))
    archive.truth |= {"a": page("a", 1), "b": page("b", 1)}
    walk, found = archive.play(archive.walk("a", "b", "b", "c"))
    assert (list(found), found["b"].kind, walk.keys_compared) == (["b"], Kind.MISSING, 3)


def test_there_may_be_more_keys_than_fit_into_one_page():
    archive = Archive()
    keys = [f"k{number:04}" for number in range(2 * PAGE + 7)]
    archive.run(*(page(key, 1) for key in keys))
    archive.truth |= {key: page(key, 1) for key in keys[:-1]}
    walk, found = archive.play(archive.walk())
    assert (list(found), walk.keys_compared) == ([keys[-1]], len(keys))


def test_no_more_keys_are_looked_at_side_by_side_than_handlers_run():
    archive = Archive()
    archive.run(*(page(f"k{number}", 1) for number in range(100)))
    running, most = 0, 0

    async def slow(key: str) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await archive.pass_s(1.0)
        running -= 1
        return page(key, 1)

    archive.refetch = slow
    assert archive.kinds() == {}
    assert most == archive.settings.concurrency


def test_a_change_that_is_applied_during_a_look_is_no_difference():
    archive = Archive()
    archive.run(page("a", 1))
    archive.truth["a"] = page("a", 2)
    looks = []

    async def lookup(key: str) -> Any:
        """The truth was read before, and the store is read before the worker writes it."""
        held = json.loads(archive.sink.stored[key].body)
        looks.append(held["v"])
        if len(looks) == 1:
            await archive.work(page("a", 2))
        return held

    archive.more["lookup"] = lookup
    walk, found = archive.play(archive.walk())
    assert (found, looks, walk.keys_changing) == ({}, [1, 2], 0)


def test_a_deletion_that_is_applied_during_a_look_is_no_difference():
    archive = Archive()
    archive.run(page("a", 1))
    looks = []

    async def lookup(key: str) -> Any:
        held = archive.sink.stored[key]
        looks.append(held.deleted)
        if len(looks) == 1:
            await archive.work(page("a", 2, gone=True))
        return None if held.deleted else json.loads(held.body)

    archive.more["lookup"] = lookup
    walk, found = archive.play(archive.walk())
    assert (found, looks, walk.keys_changing) == ({}, [False, True], 0)


def test_a_key_that_somebody_is_at_work_on_is_looked_at_again():
    archive = Archive(LEASED)
    archive.run(page("a", 1))
    archive.sink.stored.pop("a")
    archive.truth["a"] = page("a", 1)

    async def story() -> None:
        [claim] = (await archive.ledger.claim([ChangeHeader("a", order_of(2))], LeaseTerms("w7", 60.0))).granted
        walk, found = await archive.walk()
        assert (found, walk.keys_changing) == ({}, 1), "the handler may be about to write it"
        await archive.ledger.release([claim])
        _, found = await archive.walk()
        assert found["a"].kind is Kind.MISSING

    archive.play(story())


def test_truth_that_is_ahead_of_the_ledger_has_a_moment_to_arrive():
    archive = Archive()
    archive.run(page("a", 1))
    archive.truth["a"] = page("a", 2)

    async def story(arrives: bool) -> dict[str, Difference]:
        walking = asyncio.get_running_loop().create_task(archive.walk())
        await archive.pass_s(LOOK_AGAIN_S / 2)
        if arrives:
            await archive.work(page("a", 2))
        return (await walking)[1]

    late = archive.play(story(arrives=False))
    assert (late["a"].kind, late["a"].truth, late["a"].held) == (Kind.OLDER, 2, 1)
    assert archive.play(story(arrives=True)) == {}


def test_what_cannot_be_read_is_told_and_holds_up_nothing_else():
    archive = Archive()
    archive.run(page("a", 1), page("b", 1), page("c", 1))

    def refetch(key: str) -> Any:
        if key == "a":
            raise ValueError("no such table")
        return page("x" if key == "b" else key, 1)

    archive.refetch = refetch
    _, found = archive.play(archive.walk())
    assert {key: one.kind for key, one in found.items()} == {"a": Kind.FAILED, "b": Kind.FAILED}
    assert said(found["a"].detail) == "ValueError: no such table"
    assert "return the body of the key asked for" in found["b"].detail


def test_a_walk_goes_on_while_a_worker_runs():
    archive = Archive(LEASED)

    async def story() -> None:
        async with Running(archive):
            for version in range(1, 6):
                for number in range(50):
                    archive.truth[f"k{number}"] = page(f"k{number}", version)
                await archive.send(*archive.truth.values())
                _, found = await archive.walk()
                assert found == {}
                await archive.until(lambda: not archive.queue)

    archive.play(story())


def test_a_key_that_an_operator_removed_is_told_as_such():
    archive = Archive(LEASED)
    archive.run(page("a", 1))
    archive.truth["a"] = page("a", 1)
    Desk(archive).do("remove", "a")
    _, found = archive.play(archive.walk())
    assert (found["a"].kind, found["a"].detail) == (Kind.MISSING, "an operator removed it")


def test_a_difference_is_put_right_by_force():
    archive = Archive(LEASED)
    archive.run(page("a", 1), page("b", 1))
    archive.truth["a"] = page("a", 1, text="true")
    assert archive.kinds() == {"a": Kind.DIFFERENT, "b": Kind.EXTRA}
    desk = Desk(archive)
    desk.do("force", "a")
    desk.do("force", "b")
    assert archive.kinds() == {}


def test_a_store_of_a_handler_needs_a_lookup():
    archive = Archive(LEASED)
    archive.run(page("a", 1))

    class Blind:
        """A sink that cannot be read."""

        grade = archive.sink.grade

    archive.more["sink"] = Blind()
    with pytest.raises(SettingsError, match=r"decorate it with \.lookup"):
        archive.kinds()
    archive.more["lookup"] = lambda key: {"v": 1}
    assert archive.kinds() == {"a": Kind.EXTRA}
    archive.refetch = None
    with pytest.raises(SettingsError, match=r"decorate it with \.refetch"):
        archive.kinds()


@pytest.mark.parametrize("held", [b'{"id":"a","v":5}', '{"v": 5, "id": "a"}', {"id": "a", "v": 5}, {"id": "a"}])
def test_a_lookup_returns_the_body_or_some_of_its_fields(held: Any):
    archive = Archive(LEASED)
    archive.run(page("a", 5))
    archive.truth["a"] = page("a", 5)
    archive.more["lookup"] = lambda key: held.encode() if isinstance(held, str) else held
    assert archive.kinds() == {}


BODY = b'{"id": "a", "list": [1, 2], "yes": true, "none": null}'


@pytest.mark.parametrize(
    ("held", "fields"),
    [
        (BODY, None),
        (b'{"yes":true,"none":null,"list":[1,2],"id":"a"}', None),
        (b'{"id":"a","list":[1,2],"yes":true}', None),
        (b'{"id":"a","list":[2,1],"yes":true,"more":1}', ["list", "more"]),
        ({"list": "[1,2]", "yes": 1, "none": None, "unknown": None}, None),
        ({"list": "[1,2", "yes": 0}, ["list", "yes"]),
        ({}, None),
        (b"no json", []),
        (b"[]", []),
    ],
)
def test_bodies_are_compared_by_what_they_say(held: Any, fields: list[str] | None):
    assert differing(BODY, held) == fields


def test_bodies_that_are_no_json_are_compared_byte_by_byte():
    assert differing(b"\xff", b"\xff") is None
    assert differing(b"\xff", b"\xfe") == []


def test_changes_without_versions_are_compared_by_their_bodies():
    truth = Change("a", order_of(None), body=b"{}")
    assert difference("a", truth, Content(b"{}", None), EMPTY) is None
    found = difference("a", truth, Content(b'{"x":1}', None), Entry())
    assert (found.kind, found.detail) == (Kind.DIFFERENT, "x")
