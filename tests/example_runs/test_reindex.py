"""The reindex example: the new search is exact after the swap and after the way back, and it says so."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from examples.reindex import catalogue, report
from examples.reindex.catalogue import KEPT, Catalogue, Item
from examples.reindex.main import CHANGED, LOST

from running import scaled
from servers import shared

ROOT = Path(__file__).parents[2]
MAIN = ROOT / "examples" / "reindex" / "main.py"
SIZE = ("--items", "300", "--seconds", "1")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(MAIN), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=scaled(110), check=False)


def expect_right(*arguments: str) -> None:
    done = run(*SIZE, *arguments)
    told = done.stdout
    assert done.returncode == 0, told + done.stderr
    assert done.stderr == ""
    for moment in ("swap", "rollback"):
        assert re.search(rf"^keywise, after the {moment}: exact, all \d+ documents$", told, re.MULTILINE), told
    assert re.search(r"^naive, after the rollback: [1-9]\d* documents wrong$", told, re.MULTILINE), told
    assert f"{LOST!r} (missing), {CHANGED!r} (different: title)" in told
    assert re.search(r"in its first shape, a search for 'cafe' finds 0 of [1-9]", told), told
    found = re.search(r"in its new shape, a search for 'cafe' finds (\d+) of (\d+) items", told)
    assert found is not None and found[1] == found[2], told


def test_a_table_is_exact_after_the_swap_and_after_the_rollback(tmp_path: Path):
    expect_right("--folder", str(tmp_path / "a shop"))


@pytest.mark.server("postgres")
@pytest.mark.server("opensearch")
def test_so_is_an_index_with_its_catalogue_in_postgres(tmp_path: Path):
    database, search = shared.postgres().create_database("reindex_example"), shared.opensearch().url
    try:
        expect_right("--folder", str(tmp_path), "--database", database, "--search", f"{search}/reindex-example")
    finally:
        shared.opensearch().ask("DELETE", "/reindex-example-*")


def test_one_server_without_the_other_is_refused():
    done = run("--search", "opensearch://127.0.0.1:1/products")
    assert done.returncode == 2
    assert "--database and --search belong together" in done.stderr


def test_wrong_documents_are_found():
    truth = {name: Item(name, 2, "Café", 5, "cafe") for name in "abcd"}
    wrong = {
        "a": truth["a"],
        "b": msgspec.structs.replace(truth["b"], version=1),
        "c": msgspec.structs.replace(truth["c"], title="Cafe"),
        "e": truth["a"],
    }
    found = report.compare("naive", "swap", wrong, truth, with_words=True)
    assert (found.right, found.older, found.missing, found.extra, found.other) == (1, 1, 1, 1, 1)
    assert not found.is_exact
    assert report.compare("keywise", "swap", truth, truth, with_words=True).is_exact
    first_shape = {name: msgspec.structs.replace(item, words=None) for name, item in truth.items()}
    assert report.compare("keywise", "rollback", first_shape, truth, with_words=False).is_exact
    assert not report.compare("keywise", "swap", first_shape, truth, with_words=True).is_exact


def test_editors_change_delete_and_bring_back_items_at_ever_higher_versions(tmp_path: Path):
    sent: list[Item] = []

    async def story() -> dict[str, Item]:
        async with catalogue.opened(f"sqlite:///{tmp_path / 'shop.db'}") as connection:
            items = Catalogue(connection, 60, seed=1)
            enough = asyncio.Event()

            async def send(message: bytes) -> None:
                sent.append(msgspec.json.decode(message, type=Item))
                if len(sent) == 400:
                    enough.set()

            await items.fill()
            await items.migrate()
            editing = asyncio.create_task(items.edit(1e6, [send]))
            items.resume()
            await enough.wait()
            await items.pause()
            editing.cancel()
            table = {item.id: item for item in await items.page("", 1_000)}
            assert table == items.items
            return table

    table = asyncio.run(story())
    assert [item.version for item in sent] == sorted({item.version for item in sent})
    newest = {item.id: item for item in sent}
    gone = {item.id for item in newest.values() if item.state}
    assert gone and gone.isdisjoint(table)
    assert {name: table[name] for name in newest.keys() - gone} == {name: newest[name] for name in newest.keys() - gone}
    assert not newest.keys() & {f"item-{number:05}" for number in range(KEPT)}
