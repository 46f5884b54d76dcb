"""`keywise serial`, as a process of its own, beside callers that wait."""

import asyncio
import json
import threading

import pytest

import keywise
from cli.command import Folder
from keywise import Claim
from keywise.core.errors import RequestCancelledError
from running import awaited

CLINIC = """
import keywise
from keywise import Claim

app = keywise.App("sqlite:///clinic.db")


@app.serial("accept", key=lambda request: request["market"], view="100ms", timeout="10s")
async def accept(claim: Claim, request: dict) -> bool:
    return True
"""
SECOND = (
    CLINIC
    + """

@app.serial("other", key=lambda request: request["market"])
async def other(claim: Claim, request: dict) -> bool:
    return True
"""
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Folder(tmp_path, CLINIC)


def merge(folder, *words):
    return folder.keywise("serial", *words)


@awaited
async def test_an_operator_sees_what_waits_and_takes_it_out(folder):
    go_on, began = asyncio.Event(), asyncio.Event()
    async with keywise.App("sqlite:///clinic.db", observers=[]) as app:

        @app.serial("accept", key=lambda request: request["market"], poll="50ms")
        async def accept(claim: Claim, request: dict) -> bool:
            began.set()
            await go_on.wait()
            return True

        first = asyncio.ensure_future(accept({"market": "Denver"}, id="1", asked_by="ann"))
        await began.wait()
        second = asyncio.ensure_future(accept({"market": "Denver"}, id="2", asked_by="bob"))
        while await accept._turns.operator.record("2") is None:
            await asyncio.to_thread(threading.Event().wait, 0.01)
        told = (await asyncio.to_thread(merge, folder, "status", "--json")).json
        assert [(one["key"], one["waiting"], one["running"]) for one in told["keys"]] == [("Denver", 1, 1)]
        assert "Denver" in (await asyncio.to_thread(merge, folder, "status")).out
        answer = await asyncio.to_thread(merge, folder, "cancel", "2", "1", "--why", "wrong", "--who", "eve", "--json")
        assert (answer.status, answer.json["cancelled"], answer.json["left_alone"]) == (1, ["2"], ["1"])
        with pytest.raises(RequestCancelledError, match="by eve: wrong"):
            await second
        go_on.set()
        assert await first is True
    told = merge(folder, "history", "Denver", "--json").json["requests"]
    assert [(one["id"], one["asked_by"], one["outcome"]) for one in told] == [
        ("2", "bob", "cancelled"),
        ("1", "ann", "done"),
    ]
    assert json.loads(told[1]["answer"]) is True and json.loads(told[1]["request"]) == {"market": "Denver"}
    assert "cancelled: by eve: wrong" in merge(folder, "history").out


def test_keys_are_switched_and_those_that_were_off_are_observed_for_a_while(folder):
    assert merge(folder, "switch", "off", "--pattern", "D*", "--who", "ann").out.startswith("keys like 'D*': off")
    told = merge(folder, "switch", "on", "Denver", "--json").json["switch"]
    assert told["mode"] == "on" and told["observe_until"] > told["at"]
    told = merge(folder, "switch", "on", "Denver", "--settle", "0s", "--json").json["switch"]
    assert told["observe_until"] is None
    assert merge(folder, "switch", "default", "--pattern", "D*", "--settle", "0s").status == 0
    assert merge(folder, "switch", "default", "--pattern", "D*").status == 1
    told = merge(folder, "status", "--json").json["switches"]
    assert [(one["keys"], one["mode"]) for one in told] == [("Denver", "on")]


def test_nothing_gets_around_the_time_in_which_calls_may_still_be_off(folder):
    def switched(*words):
        return merge(folder, "switch", *words, "Denver", "--json").json["switch"]

    switched("off")
    switched("observe")
    told = switched("on")
    assert told["observe_until"] > told["at"]
    answer = merge(folder, "switch", "default", "Denver")
    assert "only observed" in answer.out and "run this again" in answer.err
    answer = merge(folder, "switch", "off", "Denver", "--settle", "1s")
    assert (answer.status, "--settle" in answer.err) == (2, True)


def test_words_that_are_no_text_are_refused(folder):
    odd = "\udcff"
    for words in (("history", odd), ("cancel", odd), ("switch", "off", "Denver", "--who", odd)):
        answer = merge(folder, *words)
        assert (answer.status, "no UTF-8 text" in answer.err) == (2, True)


@awaited
async def test_a_long_name_of_who_asked_leaves_the_history_readable(folder):
    async with keywise.App("sqlite:///clinic.db", observers=[]) as app:

        @app.serial("accept", key=lambda request: request["market"])
        async def accept(claim: Claim, request: dict) -> bool:
            return True

        await accept({"market": "Denver"}, id="1", asked_by="a" * 500)
    answer = await asyncio.to_thread(merge, folder, "history")
    assert max(map(len, answer.out.splitlines())) < 200 and "aaa…" in answer.out
    told = (await asyncio.to_thread(merge, folder, "history", "--json")).json["requests"]
    assert told[0]["asked_by"] == "a" * 500


def test_wrong_words_are_refused_with_what_to_do(folder):
    answer = merge(folder, "status", "--function", "acept")
    assert (answer.status, "did you mean accept?" in answer.err) == (2, True)
    assert merge(folder, "switch", "on").status == 2
    assert merge(folder, "switch", "maybe", "--all").status == 2
    folder.write("shop.py", SECOND)
    answer = merge(folder, "history")
    assert (answer.status, "accept, other" in answer.err) == (2, True)
    folder.write("shop.py", 'import keywise\n\napp = keywise.App("memory://")\n')
    answer = merge(folder, "status")
    assert (answer.status, "no serial function" in answer.err) == (1, True)
