"""What an operator does to a pipeline: pauses, eras, pruning and repairs, each with a line in the history."""

import asyncio
from typing import Any

import pytest

from flow.rig import LEASED, LEASED_CONDITIONAL, QUEUE_TRANSACTION, WAYS, Rig, Running
from flow.test_consumer import page
from keywise.core.change import Change, ChangeHeader, order_of
from keywise.core.controls import Pause
from keywise.core.entry import Claim, Commit, LeaseTerms
from keywise.core.errors import AdminError, SettingsError
from keywise.operate.admin import keys_like
from operate.admin_rig import WHO, WHY, Desk


def test_a_paused_key_waits_and_a_resumed_one_goes_on():
    desk = Desk(Rig())
    rig = desk.rig

    async def story() -> None:
        assert await desk.act("pause", "a", is_pattern=False) is None
        async with Running(rig):
            await rig.send(page("a", 1), page("b", 1))
            await rig.until(lambda: rig.stored == {"b": 1})
            await rig.pass_s(20.0)
            assert rig.stored == {"b": 1}
            assert await desk.act("resume", "a", is_pattern=False)
            await rig.until(lambda: rig.stored == {"a": 1, "b": 1})

    rig.play(story())
    assert desk.noted == [("paused", "a", None), ("resumed", "a", None)]
    assert {(line.by, line.detail) for line in desk.lines} == {(WHO, WHY)}


def test_a_second_pause_renews_the_first_and_tells_it():
    desk = Desk(Rig())
    desk.do("pause", "page-*", is_pattern=True)
    desk.rig.play(desk.rig.pass_s(5.0))
    before = desk.do("pause", "page-*", is_pattern=True)
    assert (before.keys, before.by, before.why) == ("page-*", WHO, WHY)
    [pause] = desk.rig.play(desk.rig.ledger.controls()).pauses
    assert pause.at >= before.at + 5.0
    assert [line.detail for line in desk.lines] == [f"keys like 'page-*'; {WHY}"] * 2


def test_a_pause_that_is_not_there_cannot_be_ended():
    desk = Desk(Rig())
    desk.do("pause", "a*", is_pattern=True)
    assert not desk.do("resume", "a*", is_pattern=False), "a key is not a pattern"
    assert not desk.do("resume", "a", is_pattern=True)
    assert [line.what for line in desk.lines] == ["paused"]


def test_the_end_of_claims_is_waited_for_on_paused_keys_only():
    desk = Desk(Rig())
    rig = desk.rig

    async def story() -> None:
        headers = [ChangeHeader(key, order_of(1)) for key in ("page-1", "page-2", "other")]
        claims = (await rig.ledger.claim(headers, LeaseTerms("w7", 1000.0))).granted
        waiting = asyncio.get_running_loop().create_task(desk.act("until_free", "page-*", is_pattern=True))
        await rig.until(lambda: desk.told)
        assert desk.told[-1] == "'page-1' is held by w7, and 1 more"
        await rig.ledger.commit([Commit(claim) for claim in claims if claim.key == "page-1"])
        await rig.until(lambda: desk.told[-1] == "'page-2' is held by w7")
        await rig.ledger.commit([Commit(claim) for claim in claims if claim.key == "page-2"])
        await waiting
        with pytest.raises(AdminError, match="'other' is held by w7; waited 3 s"):
            await desk.act("until_free", "*", is_pattern=True, wait_s=3.0)

    rig.play(story())


@pytest.mark.parametrize("way", [way for way in WAYS if way != LEASED_CONDITIONAL])
def test_after_a_reset_whatever_comes_next_wins(way):
    desk = Desk(Rig(way))
    desk.rig.run(page("a", 500), page("b", 500))
    assert desk.do("reset", "a") == 1
    assert desk.rig.entry("a").mark == order_of(500), "the mark stays"
    desk.rig.run(page("a", 1), page("b", 1))
    assert (desk.rig.stored, desk.rig.entry("a").mark) == ({"a": 1, "b": 500}, (1, 1, 0))
    assert desk.noted == [("reset", "a", None)]
    assert desk.lines[0].detail == f"era 1; {WHY}"


def test_a_key_that_is_held_is_reset_in_its_turn():
    desk = Desk(Rig())
    desk.rig.run(page("a", 5))
    desk.rig.play(desk.rig.ledger.claim([ChangeHeader("a", order_of(6))], LeaseTerms("w7", 100.0)))
    with pytest.raises(AdminError, match="'a' is held by w7"):
        desk.do("reset", "a", wait_s=10.0)
    assert desk.noted == []


def test_a_key_that_nobody_knows_is_not_reset():
    desk = Desk(Rig())
    with pytest.raises(AdminError, match="nothing is known of 'a'"):
        desk.do("reset", "a")
    assert desk.rig.entry("a") is None


def test_a_paused_key_can_be_reset():
    desk = Desk(Rig())
    desk.rig.run(page("a", 5))
    desk.do("pause", "*", is_pattern=True)
    assert desk.do("reset", "a") == 1


def test_the_era_is_raised_only_while_the_whole_pipeline_is_paused():
    desk = Desk(Rig())
    desk.rig.run(page("a", 500))
    desk.do("pause", "a*", is_pattern=True)
    with pytest.raises(AdminError, match="keywise pause --all --wait"):
        desk.do("raise_era")
    desk.do("pause", "*", is_pattern=True)
    assert desk.do("raise_era") == 1
    assert desk.lines[-1].detail == f"era 1; {WHY}"
    desk.do("resume", "*", is_pattern=True)
    desk.do("resume", "a*", is_pattern=True)
    desk.rig.run(page("a", 1))
    assert desk.rig.stored == {"a": 1}


def test_the_era_waits_for_claims_to_end():
    desk = Desk(Rig())
    rig = desk.rig

    async def story() -> None:
        claims = (await rig.ledger.claim([ChangeHeader("a", order_of(1))], LeaseTerms("w7", 1000.0))).granted
        await desk.act("pause", "*", is_pattern=True)
        with pytest.raises(AdminError, match="'a' is held by w7; waited 5 s"):
            await desk.act("raise_era", wait_s=5.0)
        raising = asyncio.get_running_loop().create_task(desk.act("raise_era"))
        await rig.pass_s(3.0)
        assert (await rig.ledger.controls()).era == 0
        await rig.ledger.commit([Commit(claim) for claim in claims])
        assert await raising == 1

    rig.play(story())


def test_a_pipeline_that_goes_on_while_its_claims_are_waited_for_is_not_raised():
    desk = Desk(Rig())
    rig = desk.rig

    async def story() -> None:
        claims = (await rig.ledger.claim([ChangeHeader("a", order_of(1))], LeaseTerms("w7", 1000.0))).granted
        await desk.act("pause", "*", is_pattern=True)
        raising = asyncio.get_running_loop().create_task(desk.act("raise_era"))
        await rig.until(lambda: desk.told)
        await desk.act("resume", "*", is_pattern=True)
        await rig.ledger.commit([Commit(claim) for claim in claims])
        with pytest.raises(AdminError, match="not paused"):
            await raising

    rig.play(story())


@pytest.mark.parametrize(("verb", "arguments"), [("reset", ("a",)), ("raise_era", ())])
def test_a_sink_that_compares_versions_itself_needs_a_fresh_target(verb: str, arguments: tuple):
    """Rule 20: one 64-bit version has no room for an era."""
    desk = Desk(Rig(LEASED_CONDITIONAL))
    desk.rig.run(page("a", 5))
    desk.do("pause", "*", is_pattern=True)
    with pytest.raises(AdminError, match=r"no room for an era.*fresh target"):
        desk.do(verb, *arguments)
    assert (desk.rig.entry("a").era, desk.rig.play(desk.rig.ledger.controls()).era) == (0, 0)


def test_keys_are_pruned_after_the_retention():
    desk = Desk(Rig(retention_s=1000.0))
    desk.rig.run(page("a", 1), page("b", 1))
    assert desk.do("prune") == 0
    desk.rig.play(desk.rig.pass_s(1400.0))
    assert desk.do("prune") == 2
    assert [line.detail for line in desk.lines] == [f"0 keys; {WHY}", f"2 keys; {WHY}"]


def test_without_a_retention_nothing_is_pruned():
    with pytest.raises(AdminError, match='retention="30d"'):
        Desk(Rig()).do("prune")


def test_a_full_resync_is_due_until_somebody_says_that_it_was_done():
    desk = Desk(Rig())
    assert desk.do("resynced") is False
    desk.rig.play(desk.rig.pass_s(1.0))
    desk.rig.play(desk.rig.ledger.mark_suspect([], True))
    assert desk.do("resynced") is True
    assert [line.what for line in desk.lines] == ["resynced"]
    assert desk.rig.play(desk.rig.ledger.controls()).resync_at == 0.0


class Ward(Desk):
    """Keys of a plain store that are suspect, and a truth to repair them with."""

    def __init__(self, *keys: str, **settings: Any) -> None:
        super().__init__(Rig(LEASED, horizon_s=40.0, **settings))
        self.rig.refetch = lambda key: {"id": key, "v": 5, "text": "true"}
        self.rig.run(*(page(key, 5) for key in keys))
        for key in keys:
            self.mark_suspect(key)

    def mark_suspect(self, key: str) -> None:
        self.rig.sink.write(Change(key, order_of(1)), token=99)
        self.rig.play(self.rig.ledger.commit([Commit(Claim(key, order_of(1), False, token=99))]))

    async def gathered(self, *keys: str) -> dict[str, str]:
        async with self.admin() as admin:
            return {key: cause async for key, cause in admin.repairs(keys)}

    def repair(self, *keys: str) -> dict[str, str]:
        return self.rig.play(self.gathered(*keys))


def test_all_suspects_are_repaired_after_the_horizon():
    keys = [f"k{number}" for number in range(250)]
    ward = Ward(*keys)
    early = ward.repair()
    assert set(early) == set(keys)
    assert early["k0"] == "a write of an earlier holder may still land; repair it in 40 s"
    ward.rig.play(ward.rig.pass_s(41.0))
    assert ward.repair() == dict.fromkeys(keys, "")
    assert set(ward.rig.stored.values()) == {5}
    assert ward.noted[-1][0] == "repaired"
    assert ward.repair() == {}


def test_some_suspects_are_repaired_by_name():
    ward = Ward("a", "b")
    ward.rig.play(ward.rig.pass_s(41.0))
    assert ward.repair("a", "a", "c") == {"a": "", "c": "it is not suspect"}
    assert (ward.rig.stored, ward.noted) == ({"a": 5, "b": 1}, [("repaired", "a", None)])


def test_what_cannot_be_repaired_is_told_and_holds_up_nothing_else():
    ward = Ward("a", "b", "c", "d")
    ward.rig.play(ward.rig.pass_s(41.0))
    ward.rig.play(ward.rig.ledger.claim([ChangeHeader("b", order_of(6))], LeaseTerms("w7", 100.0)))
    truth = {"a": {"id": "a", "v": 3}, "c": {"id": "x", "v": 5}, "d": {"id": "d", "v": 5}}
    ward.rig.refetch = truth.get
    told = ward.repair()
    assert told["a"] == "refetch returned an older version than the one that was, or may have been, written"
    assert told["b"] == "the key is busy"
    assert "return the body of the key asked for" in told["c"]
    assert told["d"] == ""


def test_a_paused_suspect_is_repaired_by_an_operator():
    ward = Ward("a")
    ward.do("pause", "*", is_pattern=True)
    ward.rig.play(ward.rig.pass_s(41.0))
    assert ward.repair() == {"a": ""}


def test_without_a_source_of_truth_nothing_is_repaired():
    ward = Ward("a", "b")
    ward.rig.refetch = None
    with pytest.raises(SettingsError, match=r"\.refetch"):
        ward.repair()


def test_a_pattern_that_covers_every_known_key_is_counted():
    rig = Rig(QUEUE_TRANSACTION)
    rig.run(*(page(f"page-{number}", 1) for number in range(1200)))
    pipeline = rig.pipeline()
    assert rig.play(keys_like(pipeline, "page-*")) == 1200
    assert rig.play(keys_like(pipeline, "page-1*")) is None
    rig.run(page("z", 1))
    assert rig.play(keys_like(pipeline, "page-*")) is None
    assert rig.play(keys_like(pipeline, "*")) == 1201


def test_what_an_operator_says_is_kept_in_any_store():
    desk = Desk(Rig())

    async def story() -> None:
        async with desk.admin() as admin:
            await admin.record("noted", "a", 1, "half \udcff" + "x" * 5000)

    desk.rig.play(story())
    [line] = desk.lines
    assert line.detail.startswith("half \\udcff") and len(line.detail) < 2100


def test_a_pause_is_made_by_somebody_for_a_reason():
    desk = Desk(Rig())
    desk.do("pause", "a", is_pattern=False)
    assert desk.rig.play(desk.rig.ledger.controls()).pauses == (Pause("a", False, desk.lines[0].at, WHO, WHY),)
