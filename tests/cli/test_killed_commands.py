"""An operator's command is killed with `kill -9` while it writes; its key goes on after the lease, and ends right."""

import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from cli.admin_shop import SHOP, Office

SHORT = 'horizon="100ms", lease="2s", margin="500ms", repair="1h"'
SLOW = "create trigger slow before insert on stored begin select length(hex(randomblob(100000000))); end"


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    office = Office(tmp_path)
    office.write("shop.py", SHOP.replace('horizon="100ms", lease="5s", margin="1s"', 'horizon="100ms"'))
    office.write("shop.py", (tmp_path / "shop.py").read_text().replace('horizon="100ms"', SHORT))
    yield office
    office.close()


def page(key: str, version: int) -> dict:
    return {"id": key, "v": version}


def suspects(office: Office) -> list[tuple]:
    return office.rows("shop.db", "select key from keywise_active where suspicions > 0")


def test_a_force_that_is_killed_inside_a_handler_leaves_its_key_to_the_worker_and_to_a_repair(office):
    """Nobody knows what became of its write, so the key is suspect once somebody else has taken it over."""
    office.tell_truth(a=page("a", 8))
    office.start_worker()
    office.send("mails", page("a", 5))
    office.until(lambda: ("end", "a", 5, 0) in office.log(), "the first version")
    office.write("closed", "")
    forcing = office.start("force", "a", "--pipeline", "mails")
    office.until(lambda: office.log()[-1] == ("begin", "a", 8, 0), "the forced write")
    forcing.kill()
    forcing.communicate()
    (office.path / "closed").unlink()
    office.tell_truth(a=page("a", 9))
    office.send("mails", page("a", 7), page("a", 9))
    office.until(lambda: ("end", "a", 9, 0) in office.log(), "the next version")
    assert suspects(office) == [("a",)]
    assert "repaired 'a'" in office.act("repair", "a", "--pipeline", "mails").out
    assert suspects(office) == []
    log = office.log()
    assert [version for _, _, version, _ in log] == [5, 5, 8, 9, 9, 9, 9], "7 is older than what may be written"
    taken = [one for one in log if one != ("begin", "a", 8, 0)]
    assert all(one[0] != other[0] for one, other in pairwise(taken)), "begin and end take turns"
    assert office.lines("forced") == [], "it was not there any more to say so"


def test_a_force_that_is_killed_inside_its_transaction_has_no_effect_and_can_be_repeated(office):
    office.tell_truth(a=page("a", 8))
    office.send("pages", page("a", 5))
    office.keywise("run", "shop:app", "--until-empty")
    office.execute(SLOW)
    for _ in range(2):
        kill_at_the_write(office, office.start("force", "a", "--pipeline", "pages", "--wait", "30s"))
        assert office.stored() == {"a": 5}
    office.execute("drop trigger slow")
    assert "at version 8" in office.act("force", "a", "--pipeline", "pages", "--wait", "30s").out
    office.send("pages", page("a", 7), page("a", 9))
    office.keywise("run", "shop:app", "--until-empty")
    assert (office.stored(), suspects(office)) == ({"a": 9}, [])


def kill_at_the_write(office: Office, forcing: subprocess.Popen[str]) -> None:
    office.until(lambda: is_locked(office) or forcing.poll() is not None, "its transaction")
    assert forcing.poll() is None, "it was over too soon"
    forcing.kill()
    forcing.communicate()


def is_locked(office: Office) -> bool:
    """Whether somebody is at a write that takes its time: two looks in a row find the file locked."""
    return all(_is_locked_now(office) for _ in range(2))


def _is_locked_now(office: Office) -> bool:
    with closing(sqlite3.connect(office.path / "shop.db", timeout=0.1, isolation_level=None)) as file:
        try:
            file.execute("begin immediate")
        except sqlite3.OperationalError:
            return True
        file.execute("rollback")
        return False
