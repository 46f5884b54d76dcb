"""`keywise simulate shop:app` runs the handler of an app under faults, and prints a story and how to see it again."""

from pathlib import Path

import pytest

from cli.command import Folder

SHOP = """
import keywise
from keywise import Change

app = keywise.App("sqlite:///shop.db")
orders = app.pipeline("orders", key="id")
orders.source("sqlite:///shop.db")
stock = {}
seen = {}


@orders.apply
def take(change: Change[dict]) -> None:
    stock["pieces"] -= 1


def state():
    return dict(stock)


def reset():
    stock["pieces"] = 100
"""

IDEMPOTENT = SHOP.replace('stock["pieces"] -= 1', 'stock[change.key] = "taken"')
REMEMBERING = SHOP.replace('key="id"', 'key="id", version="v"').replace(
    'stock["pieces"] -= 1', "stock[change.key] = seen.setdefault(change.key, change.version)"
)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path, SHOP)


def test_a_handler_that_is_not_idempotent_is_caught_and_its_seed_replays_the_story(folder):
    answer = folder.keywise("simulate", "shop:app", "--seeds", "30")
    assert answer.status == 1
    lines = answer.out.splitlines()
    assert lines[0].startswith("orders (plain): 3 messages of 3 keys, 30 seeds, ")
    assert lines[1].startswith("faults: ")
    assert "  'pieces' should be  97" in lines
    assert sum("runs the handler for the change" in line for line in lines) > 1
    assert answer.err.startswith("Error: the store of pipeline 'orders' does not end up right; see it again with: ")
    command = answer.err.partition("see it again with: keywise ")[2].split()
    assert command[:3] == ["simulate", "shop:app", "--seed"]
    again = folder.keywise(*command)
    assert again.status == 1
    assert again.out.splitlines()[4:] == lines[4:]
    assert not (folder.path / "shop.db").exists()


def test_an_idempotent_handler_passes(folder):
    folder.write("shop.py", IDEMPOTENT)
    answer = folder.keywise("simulate", "shop.py:app", "--seeds", "10")
    assert (answer.status, answer.err) == (0, "")
    assert answer.out.splitlines()[-1] == "The store ends up right in every seed."


def test_scripts_get_the_findings_and_the_command(folder):
    answer = folder.keywise("simulate", "shop:app", "--seeds", "30", "--json")
    assert answer.status == 1
    result = answer.json
    first = result["findings"][0]
    assert result["ok"] is False
    assert result["replay"] == f"keywise simulate shop:app --seed {first['seed']}"
    assert first["differences"][0]["wanted"] == "97"
    assert len(first["story"]) > 3
    folder.write("shop.py", IDEMPOTENT)
    result = folder.keywise("simulate", "shop:app", "--seeds", "3", "--json").json
    assert (result["ok"], result["findings"], result["replay"], result["seeds"]) == (True, [], None, 3)


def test_every_run_begins_with_the_memory_of_a_fresh_process(folder):
    """What the first run has left in a module would make all others look alike."""
    folder.write("shop.py", REMEMBERING)
    answer = folder.keywise("simulate", "shop:app", "--seeds", "20")
    assert answer.status == 1
    assert "The store does not end up right in" in answer.out


def test_messages_and_functions_are_named_by_options(folder):
    folder.write("shop.py", IDEMPOTENT)
    folder.write("samples.jsonl", '{"id": "a"}\n\n{"id": "b"}\n')
    folder.write(
        "watching.py",
        "import shop\n\ndef held():\n    return dict(shop.stock)\n\ndef empty():\n    shop.stock.clear()\n",
    )
    options = ("--messages", "samples.jsonl", "--state", "watching:held", "--reset", "watching:empty", "--seeds", "2")
    answer = folder.keywise("simulate", "shop:app", "--pipeline", "orders", *options)
    assert (answer.status, answer.err) == (0, "")
    assert answer.out.startswith("orders (plain): 2 messages of 2 keys, 2 seeds")


@pytest.mark.parametrize(
    ("arguments", "status", "error"),
    [
        (("--seed", "3"), 2, "need an APP"),
        (("shop:app", "--serial"), 2, "without --serial, --reindex, --replay"),
        (("shop:app", "--grade", "plain"), 2, "--grade"),
        (("shop:app", "--pipeline", "order"), 2, "did you mean orders?"),
        (("shop:app", "--state", "nothing"), 2, "shop has no 'nothing'"),
        (("shop:app", "--state", "stock"), 2, "state is dict; it has to be a function"),
        (("shop:app", "--messages", "state:nowhere"), 2, "no module is called 'state'"),
        (("nowhere:app",), 2, "no module is called 'nowhere'"),
    ],
)
def test_wrong_usage_is_reported_with_what_to_write(folder, arguments, status, error):
    answer = folder.keywise("simulate", *arguments)
    assert (answer.status, answer.out) == (status, "")
    assert error in answer.err
