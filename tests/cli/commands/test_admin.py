"""The operator's commands on SQLite, with a worker at work in another process."""

import json
import os
import socket
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from cli.admin_shop import Office
from cli.test_first_steps import ODD_KEY
from keywise.core.controls import Controls, Move, text_of

WHY = ("--why", "ticket 7", "--who", "ada@desk")


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    office = Office(tmp_path)
    yield office
    office.close()


def page(key: str, version: int, **more: object) -> dict:
    return {"id": key, "v": version, **more}


@pytest.mark.parametrize("pipeline", ["pages", "mails"])
def test_a_paused_key_waits_and_the_others_go_on(office, pipeline):
    def applied() -> set:
        return set(office.stored()) if pipeline == "pages" else {key for op, key, *_ in office.log() if op == "end"}

    office.start_worker()
    paused = office.act("pause", "a", "--pipeline", pipeline, *WHY)
    assert paused.out == f"paused 'a' in {pipeline}\n"
    office.send(pipeline, page("a", 1), page("b", 1))
    office.until(lambda: applied() == {"b"}, "b")
    again = office.act("pause", "a", "--pipeline", pipeline, "--json")
    assert again.json == {"pipeline": pipeline, "paused": "a", "is_pattern": False, "was_paused": True}
    assert applied() == {"b"}
    assert office.act("resume", "a", "--pipeline", pipeline, *WHY).out == f"resumed 'a' in {pipeline}\n"
    office.until(lambda: applied() == {"a", "b"}, "a")
    lines = office.lines("paused", "resumed")
    assert [line[:2] for line in lines] == [("paused", "a"), ("paused", "a"), ("resumed", "a")]
    assert lines[0][3:] == lines[2][3:] == ("ticket 7", "ada@desk")
    assert lines[1][4] == f"{os.environ.get('USER') or 'root'}@{socket.gethostname()}"
    resumed = office.keywise("resume", "a", "--pipeline", pipeline)
    assert (resumed.status, resumed.err) == (1, f"Error: 'a' is not paused in {pipeline}; nothing is\n")


def test_a_pause_waits_for_handlers_that_run(office):
    office.write("closed", "")
    office.start_worker()
    office.send("mails", page("page-1", 1))
    office.until(office.log, "the handler")
    pausing = office.start("pause", "--pattern", "page-*", "--pipeline", "mails", "--wait", "--yes")
    assert pausing.stdout.readline() == "paused keys like 'page-*' in mails\n"
    assert "waiting: 'page-1' is held by" in pausing.stderr.readline()
    (office.path / "closed").unlink()
    assert pausing.communicate()[0] == "no claim is held any more\n"
    assert (pausing.returncode, [op for op, *_ in office.log()]) == (0, ["begin", "end"])
    office.send("mails", page("page-1", 2), page("other", 1))
    office.until(lambda: ("end", "other", 1, 0) in office.log(), "the other key")
    assert len(office.log()) == 4
    office.act("resume", "--pattern", "page-*", "--pipeline", "mails", "--yes")
    office.until(lambda: ("end", "page-1", 2, 0) in office.log(), "the resumed key")


def test_a_whole_pipeline_is_paused_after_a_question_and_takes_nothing(office):
    office.send("pages", page("a", 1), page("b", 1))
    office.keywise("run", "shop:app", "--until-empty")
    refused = office.keywise("pause", "--all", "--pipeline", "pages")
    assert refused.status == 2
    assert "Pause every key of pages (2 known keys)?" in refused.err and "pass --yes" in refused.err
    assert office.lines("paused") == []
    status, shown = office.typed("n\n", "pause", "--pattern", "?", "--pipeline", "pages")
    assert status == 1
    assert "Pause keys like '?', which is every key of pages (2 known keys)?" in shown and "nothing was done" in shown
    assert office.typed("y\n", "pause", "--all", "--pipeline", "pages")[0] == 0
    office.start_worker()
    office.send("pages", page("a", 2))
    office.until(lambda: office.lines("pause seen"), "the worker's word")
    assert office.stored() == {"a": 1, "b": 1}
    half = office.keywise("resume", "a", "--pipeline", "pages")
    assert half.status == 1 and "paused are: every key" in half.err
    office.act("resume", "--all", "--pipeline", "pages", "--yes")
    office.until(lambda: office.stored() == {"a": 2, "b": 1}, "the resumed pipeline")


def test_the_status_says_who_paused_a_key_when_and_why(office):
    office.act("pause", "a", "--pipeline", "pages", *WHY)
    [said] = [line for line in office.act("status").out.splitlines() if "paused" in line]
    assert said.startswith("pages: paused: 'a' by ada@desk, 20") and said.endswith(": ticket 7")
    for number in range(7):
        office.act("pause", f"b{number}", "--pipeline", "pages", *WHY)
    said = [line for line in office.act("status").out.splitlines() if "paused" in line]
    assert [line.split(" by ")[0] for line in said[:-1]] == [
        f"pages: paused: {key!r}" for key in ("a", "b0", "b1", "b2", "b3")
    ]
    assert said[-1] == "pages: paused: 3 more keys; keywise why KEY shows the pauses of a key"


def test_status_and_why_say_that_the_sink_moves_and_commands_ask_to_try_again(office):
    office.send("pages", page("a", 1))
    office.act("run", "shop:app", "pages", "--until-empty")
    controls = text_of(Controls(move=Move("stored", "stored_7", 99)))
    office.execute(f"update keywise_scopes set controls = '{controls}' where name = 'pages'")
    moves = "the sink moves to target 'stored_7' now, and every change waits for that, some seconds"
    assert f"pages: {moves}" in office.act("status").out.splitlines()
    shown = office.act("why", "a", "--pipeline", "pages").out
    assert moves in " ".join(shown.split())
    assert "version 2 or above       waits until the sink has moved" in shown
    assert json.loads(office.act("why", "a", "--json").out)["pipelines"][0]["moves_to"] == "stored_7"
    refused = office.keywise("force", "a", "--pipeline", "pages")
    wanted = "Error: pipeline 'pages' moves to target 'stored_7' now, which takes some seconds; try again\n"
    assert (refused.status, refused.err) == (1, wanted)


def test_a_resume_that_ends_nothing_names_what_is_paused(office):
    refused = office.keywise("resume", "a", "--pipeline", "pages")
    assert (refused.status, refused.err) == (1, "Error: 'a' is not paused in pages; nothing is\n")
    for keys in (["b"], ["--pattern", "c*"]):
        office.act("pause", *keys, "--pipeline", "pages", "--yes")
    refused = office.keywise("resume", "a", "--pipeline", "pages")
    assert (refused.status, refused.err) == (1, "Error: 'a' is not paused in pages; paused are: keys like 'c*', 'b'\n")
    for number in range(6):
        office.act("pause", f"d{number}", "--pipeline", "pages")
    refused = office.keywise("resume", "--all", "--pipeline", "pages")
    assert refused.err.endswith("; paused are: keys like 'c*', 'b', 'd0', 'd1', 'd2' and 3 more\n")


def test_a_forced_key_never_runs_beside_the_worker_and_the_next_version_wins(office):
    office.tell_truth(a=page("a", 8))
    office.write("closed", "")
    office.start_worker()
    office.send("mails", page("a", 5))
    office.until(office.log, "the handler")
    forcing = office.start("force", "a", "--pipeline", "mails", *WHY)
    assert "waiting: 'a' is held by" in forcing.stderr.readline()
    assert office.log() == [("begin", "a", 5, 0)]
    (office.path / "closed").unlink()
    said, _ = forcing.communicate()
    assert (forcing.returncode, said) == (
        0,
        "forced 'a' in mails: wrote what refetch or the origin returned, at version 8\n",
    )
    office.send("mails", page("a", 7), page("a", 9))
    office.until(lambda: ("end", "a", 9, 0) in office.log(), "the next version")
    log = office.log()
    assert [version for _, _, version, _ in log] == [5, 5, 8, 8, 9, 9]
    assert all(one[0] != other[0] for one, other in pairwise(log)), "begin and end take turns"
    assert office.lines("forced") == [("forced", "a", 8, "ticket 7", "ada@desk")]


def test_keys_are_forced_and_removed_in_a_table_while_a_worker_writes_it(office):
    office.start_worker()
    office.send("pages", *(page(f"k{number}", 1) for number in range(50)), page("a", 5), page("b", 5))
    office.until(lambda: len(office.stored()) == 52, "all pages")
    office.tell_truth(a=page("a", 5, text="true"), k1=page("k1", 1))
    forced = office.act("force", "a", "--pipeline", "pages", "--json").json
    assert forced == {
        "pipeline": "pages",
        "key": "a",
        "era": 0,
        "version": 5,
        "generation": 1,
        "deleted": False,
    }
    [[body]] = office.rows("shop.db", "select body from stored where key = 'a'")
    assert json.loads(body)["text"] == "true"
    assert "version 5, generation 1; its next version" in office.act("remove", "b", "--pipeline", "pages").out
    assert "the lowest order" in office.act("remove", "never seen", "--pipeline", "pages").out
    assert "b" not in office.stored()
    office.send("pages", page("b", 5), page("a", 5, text="old"), page("never seen", -5), page("z", 1))
    office.until(lambda: {"z", "never seen"} <= set(office.stored()), "what came after")
    assert "b" not in office.stored(), "an old message does not bring it back"
    office.send("pages", page("b", 6), page("a", 6))
    office.until(lambda: (office.stored().get("a"), office.stored().get("b")) == (6, 6), "the next versions")
    older = office.keywise("force", "a", "--pipeline", "pages")
    assert older.status == 1 and "version 5, which is older than the mark at version 6" in older.err
    assert office.act("force", "a", "--pipeline", "pages", "--older").status == 0
    assert "its deletion" in office.act("force", "z", "--pipeline", "pages").out
    assert [line[:3] for line in office.lines("forced", "removed")] == [
        ("forced", "a", 5),
        ("removed", "b", 5),
        ("removed", "never seen", None),
        ("forced", "a", 6),
        ("forced", "z", 1),
    ]


def test_a_key_is_reset_and_then_a_whole_pipeline(office):
    office.start_worker()
    office.send("pages", page("a", 500), page("b", 500))
    office.until(lambda: len(office.stored()) == 2, "both pages")
    assert office.act("reset", "a", "--pipeline", "pages").out == "'a' of pages is in era 1: the next change wins\n"
    office.send("pages", page("a", 1), page("b", 1))
    office.until(lambda: office.stored()["a"] == 1, "the new numbering")
    early = office.keywise("reset", "--era", "--pipeline", "pages")
    assert early.status == 1 and "keywise pause --all --wait" in early.err
    office.act("pause", "--all", "--wait", "--yes", "--pipeline", "pages")
    asked = office.keywise("reset", "--era", "--pipeline", "pages")
    assert asked.status == 2 and "2 known keys" in asked.err
    raised = office.act("reset", "--era", "--yes", "--wait", "60s", "--pipeline", "pages", "--json", *WHY)
    assert raised.json == {"pipeline": "pages", "key": None, "era": 2}
    office.send("pages", page("b", 1))
    office.act("resume", "--all", "--yes", "--pipeline", "pages")
    office.until(lambda: office.stored() == {"a": 1, "b": 1}, "the new era")
    assert office.lines("reset", "era raised")[1] == ("era raised", "", None, "era 2; ticket 7", "ada@desk")
    unknown = office.keywise("reset", "nobody", "--pipeline", "pages")
    assert unknown.status == 1 and "nothing is known of 'nobody'" in unknown.err


def test_a_key_that_is_held_for_long_is_told_with_its_holder(office):
    office.tell_truth(a=page("a", 8))
    office.write("closed", "")
    office.start_worker()
    office.send("mails", page("a", 5))
    office.until(office.log, "the handler")
    for arguments in (["force", "a"], ["remove", "a"], ["reset", "a"]):
        held = office.keywise(*arguments, "--pipeline", "mails", "--wait", "100ms")
        assert held.status == 1
        assert f"Error: 'a' is held by {socket.gethostname()}-{office.worker.pid}-" in held.err
        assert "wait longer with --wait" in held.err
    (office.path / "closed").unlink()


def test_a_write_of_unknown_outcome_leaves_a_suspect_that_is_repaired(office):
    office.tell_truth(a=page("a", 5))
    office.write("broken", "connection reset by peer")
    lost = office.keywise("force", "a", "--pipeline", "mails")
    assert lost.status == 1
    assert "reset by peer (shop.py, line" in lost.err and "keywise repair" in lost.err
    assert "it may or may not have been written" in lost.err
    (office.path / "broken").unlink()
    # The lease of five seconds runs out by itself.
    office.act("remove", "a", "--pipeline", "mails", "--wait", "20s")
    assert office.keywise("status", "--pipeline", "mails", "--json").json["pipelines"][0]["suspects"] == 1
    repaired = office.act("repair", "--pipeline", "mails", *WHY)
    assert repaired.out == "repaired 'a'\n"
    assert office.log()[-1] == ("end", "a", 5, 1), "what an operator removed stays removed"
    assert office.lines("repaired") == [("repaired", "a", None, "ticket 7", "ada@desk")]
    assert office.act("repair", "--pipeline", "mails").out == "no key of mails is suspect\n"
    named = office.keywise("repair", "a", "b", "--pipeline", "mails", "--json")
    assert (named.status, [one["cause"] for one in named.json["left"]]) == (1, ["it is not suspect"] * 2)


def test_keys_are_pruned_with_a_declared_retention(office):
    refused = office.keywise("prune", "--pipeline", "pages")
    assert refused.status == 1 and 'retention="30d"' in refused.err
    text = (office.path / "shop.py").read_text()
    office.write("shop.py", text.replace('app.pipeline("pages",', 'app.pipeline("pages", retention="2h",'))
    assert office.act("prune", "--pipeline", "pages", "--json", *WHY).json == {
        "pipeline": "pages",
        "pruned": 0,
        "retention_s": 7200.0,
    }
    assert office.lines("pruned") == [("pruned", "", None, "0 keys; ticket 7", "ada@desk")]


def test_an_odd_key_is_acted_upon_and_shown_harmlessly(office):
    office.tell_truth(**{ODD_KEY: page(ODD_KEY, 5)})
    for arguments in (["pause"], ["force"], ["remove"], ["reset"], ["resume"]):
        answer = office.act(*arguments, ODD_KEY, "--pipeline", "pages", "--why", ODD_KEY)
        assert repr(ODD_KEY) in answer.out
        assert "\x1b" not in answer.out + answer.err
    asked = office.keywise("force", ODD_KEY, "--pipeline", "pages", "--json")
    assert asked.json["key"] == ODD_KEY
    assert len(office.keywise("why", ODD_KEY, "--json").json["pipelines"]) == 1


def test_what_is_missing_is_said_with_what_to_write(office):
    several = office.keywise("force", "a")
    assert (several.status, several.out) == (2, "")
    assert "say which with --pipeline: pages, mails" in several.err
    office.write("shop.py", (office.path / "shop.py").read_text().replace("pages.refetch(truth)", ""))
    for command in ("force", "repair"):
        blind = office.keywise(command, "a", "--pipeline", "pages")
        assert blind.status == 1 and "decorate it with .refetch" in blind.err
    for arguments in (["pause"], ["pause", "a", "--all"], ["resume"], ["reset"], ["reset", "a", "--era"]):
        wrong = office.keywise(*arguments, "--pipeline", "pages")
        assert wrong.status == 2 and "name a key" in wrong.err
    assert office.keywise("force", "", "--pipeline", "pages").status == 2
    assert office.keywise("force", "a", "--pipeline", "pages", "--wait", "soon").status == 2


def test_a_table_is_reconciled_with_the_truth_and_put_right(office):
    office.send("pages", *(page(key, 5) for key in ("same", "lost", "odd", "gone", "old")))
    office.keywise("run", "shop:app", "--until-empty")
    office.execute("delete from stored where key = 'lost'", "update stored set body = '{}' where key = 'odd'")
    truth = {key: page(key, 5) for key in ("same", "lost", "odd")} | {"old": page("old", 6), ODD_KEY: page(ODD_KEY, 1)}
    office.tell_truth(**truth)
    office.write("keys.txt", f"same\n\n{json.dumps(ODD_KEY)}\n")
    office.start_worker()
    found = office.keywise("reconcile", "--pipeline", "pages", "--keys-from", "keys.txt", "--json")
    *lines, summary = map(json.loads, found.out.splitlines())
    kinds = {"lost": "missing", "odd": "different", "gone": "should be gone", "old": "older", ODD_KEY: "missing"}
    assert (found.status, {line["key"]: line["kind"] for line in lines}) == (1, kinds)
    differences = {"different": 1, "missing": 2, "older": 1, "should be gone": 1}
    assert summary == {"looked": 6, "changing": 0, "repaired": 0, "differences": differences}
    asked = office.keywise("reconcile", "--pipeline", "pages", "--keys-from", "-", "--repair", stdin=f"{ODD_KEY!r}\n")
    assert asked.status == 2 and "Write 4 keys of pages again?" in asked.err
    assert "'lost' is missing in the sink: the truth has version 5" in asked.out
    mended = office.act("reconcile", "--pipeline", "pages", "--keys-from", "keys.txt", "--repair", "--yes", *WHY)
    assert f"repaired {ODD_KEY!r}" in mended.out and "\x1b" not in mended.out
    assert mended.out.endswith("looked at 6 keys: 5 differences, 5 repaired\n")
    assert office.stored() == {"same": 5, "lost": 5, "odd": 5, "old": 6, ODD_KEY: 1}
    assert len(office.lines("forced")) == 5
    assert office.act("reconcile", "--pipeline", "pages").out == "looked at 6 keys: 0 differences\n"


def test_the_store_of_a_handler_is_reconciled_with_a_lookup(office):
    office.send("mails", page("a", 5), page("b", 5))
    office.keywise("run", "shop:app", "--until-empty")
    office.tell_truth(a=page("a", 5), b=page("b", 4))
    found = office.keywise("reconcile", "--pipeline", "mails", "--repair", "--yes")
    assert found.status == 1
    assert "'b' is different in the sink: the truth has version 4; v" in found.out
    assert "older than the mark at version 5" in found.out and "1 difference" in found.err
    office.write("shop.py", (office.path / "shop.py").read_text().replace("@mails.lookup", ""))
    blind = office.keywise("reconcile", "--pipeline", "mails")
    assert blind.status == 1 and "decorate it with .lookup" in blind.err
    missing = office.keywise("reconcile", "--pipeline", "pages", "--keys-from", "nowhere.txt")
    assert missing.status == 2 and "no file 'nowhere.txt'" in missing.err
