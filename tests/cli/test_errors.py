"""What the command says when it cannot work: one line that says what to do, an exit status, and no traceback."""

from pathlib import Path

import pytest

from cli.command import Answer, Folder
from servers import machine


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def expect(answer: Answer, status: int, *words: str) -> None:
    assert answer.status == status, answer
    assert answer.out == ""
    assert "Traceback" not in answer.err
    for word in words:
        assert word in answer.err


def test_a_missing_app_is_asked_for_by_option_or_variable(folder):
    expect(folder.keywise("status", app=None), 2, "--app shop:app", "KEYWISE_APP")
    expect(folder.keywise("run", app=None), 2, "keywise run shop:app", "KEYWISE_APP")


def test_a_target_that_is_no_app_is_named_with_those_that_are(folder):
    expect(folder.keywise("status", "--app", "shop"), 2, "module:attribute")
    expect(folder.keywise("status", "--app", "shop:ap"), 2, "'ap'", "shop:app")
    expect(folder.keywise("status", "--app", "json:app"), 2, "no keywise.App")


def test_a_module_that_is_not_there_is_told_from_one_that_is_broken(folder):
    folder.write("needy.py", "import nothing_of_that_name\n")
    folder.write("halved.py", "app = (\n")
    folder.write("wrong.py", "import keywise\n\napp = keywise.App('shop.db')\n")
    expect(folder.keywise("status", "--app", "shopp:app"), 2, "no module is called 'shopp'")
    expect(folder.keywise("status", "--app", "shopp.py:app"), 2, "no file 'shopp.py'")
    expect(folder.keywise("status", "--app", "needy:app"), 1, "nothing_of_that_name", "needy.py, line 1")
    expect(folder.keywise("status", "--app", "halved:app"), 1, "SyntaxError", "halved.py")
    expect(folder.keywise("status", "--app", "wrong:app"), 1, "shop.db is no URL", "sqlite:///shop.db")


def test_an_app_is_found_by_the_path_of_its_file_with_its_neighbours(folder):
    folder.write("inner/names.py", "NAME = 'pages'\n")
    text = (folder.path / "shop.py").read_text()
    folder.write("inner/other.py", text.replace('app.pipeline("pages"', "app.pipeline(__import__('names').NAME"))
    answer = folder.keywise("status", "--app", "inner/other.py:app", app=None)
    assert (answer.status, answer.err) == (0, "")


def test_an_unknown_pipeline_is_refused_with_the_nearest(folder):
    expect(folder.keywise("run", "shop:app", "page"), 2, "'page'", "did you mean pages?")
    expect(folder.keywise("send", "xyz", "{}"), 2, "'xyz'", "pages, mails")
    expect(folder.keywise("why", "a", "--pipeline", "page"), 2, "did you mean pages?")


def test_a_bad_option_is_wrong_usage(folder):
    expect(folder.keywise("status", "--jsn"), 2, "--jsn")
    expect(folder.keywise("send", "pages", "{}", "--delay", "soon"), 2, "'soon'", "500ms")
    expect(folder.keywise("send", "pages", "{oops"), 2, "no JSON document")
    expect(folder.keywise("dead", "replay"), 2, "--all")
    expect(folder.keywise("dead", "replay", "1", "--all"), 2, "--all")
    expect(folder.keywise("dead", "list", "--limit", "0"), 2, "--limit")
    expect(folder.keywise("simulate", "--replay", "3"), 2, "--grade")


def test_a_key_that_is_no_text_is_wrong_usage(folder):
    expect(folder.keywise("why", "\udcff"), 2, "no UTF-8")
    expect(folder.keywise("why", ""), 2, "key")


@pytest.mark.parametrize("arguments", [("run", "shop:app"), ("status",), ("send", "pages", "{}"), ("why", "a")])
def test_an_unknown_scheme_is_named_with_the_known_ones(folder, arguments):
    text = (folder.path / "shop.py").read_text()
    folder.write("shop.py", text.replace('.source("sqlite:///shop.db").', '.source("sqlit:///shop.db").'))
    expect(folder.keywise(*arguments), 1, "sqlit://", "did you mean sqlite")


@pytest.mark.parametrize(
    "arguments", [("run", "shop:app"), ("status",), ("send", "pages", "{}"), ("why", "a"), ("dead", "list")]
)
def test_a_broken_file_is_named(folder, arguments):
    folder.write("shop.db", "no database at all\n" * 100)
    expect(folder.keywise(*arguments), 1, "shop.db", "no SQLite database")


def test_messages_are_not_sent_into_the_memory_of_a_command_that_ends(folder):
    folder.write("shop.py", (folder.path / "shop.py").read_text().replace("sqlite:///shop.db", "memory://"))
    expect(folder.keywise("send", "mails", "{}"), 1, "memory", "sqlite:///shop.db")


def test_an_app_without_pipelines_is_told_how_to_get_one(folder):
    folder.write("shop.py", "import keywise\n\napp = keywise.App('sqlite:///shop.db')\n")
    expect(folder.keywise("run", "shop:app"), 1, "app.pipeline")


def test_a_journal_that_cannot_be_read_is_told_beside_what_is_known(folder):
    text = (folder.path / "shop.py").read_text()
    folder.write("journaled.py", text.replace('app.pipeline("pages",', 'app.pipeline("pages", journal="journal",'))
    folder.write("journal/pages@one.journal", '{"since": 5.0, "begun": [["a", [0, 1, 0], false]]}\n')
    (folder.path / "journal" / "pages@two.journal").mkdir()
    answer = folder.keywise("status", "--app", "journaled:app")
    assert (answer.status, answer.err) == (0, "")
    assert "pages: a journal cannot be read: journal/pages@two.journal: Is a directory" in answer.out
    assert "1 key is noted in 1 journal; a worker with this journal makes them suspect" in answer.out


def test_a_queue_that_is_missing_hides_no_other_pipeline(folder):
    text = (folder.path / "shop.py").read_text()
    mails = 'mails.source("sqlite:///shop.db")'
    assert mails in text
    folder.write("torn.py", text.replace(mails, 'mails.source("sqlite:///nowhere/queue.db")'))
    assert folder.keywise("send", "pages", '{"id": "a", "v": 1}', app="torn:app").status == 0
    answer = folder.keywise("status", app="torn:app")
    assert (answer.status, answer.err) == (1, "Error: mails cannot be shown in full; see the cause above\n")
    assert "the folder nowhere of nowhere/queue.db does not exist" in " ".join(answer.out.split())
    assert "pages" in answer.out and "atomic" in answer.out
    told = folder.keywise("status", "--json", app="torn:app").json
    assert [one["pipeline"] for one in told["pipelines"]] == ["pages", "mails"]


def test_a_broker_that_is_away_hides_nothing_that_the_ledger_knows(folder):
    text = (folder.path / "shop.py").read_text()
    folder.keywise("send", "mails", '{"id": "a", "v": 1}', '{"id": "b", "v": 1, "bad": true}')
    folder.work()
    port = machine.free_port()
    away = f'mails.source("sqlite:///shop.db").source("amqp://shop:s3cret@127.0.0.1:{port}/?queue=mails")'
    folder.write("torn.py", text.replace('mails.source("sqlite:///shop.db")', away))
    answer = folder.keywise("status", "--pipeline", "mails", app="torn:app")
    assert (answer.status, answer.err) == (1, "Error: mails cannot be shown in full; see the cause above\n")
    said = " ".join(answer.out.split())
    assert "mails plain 1 0 0 0 1" in said, "keys and dead letters"
    assert f"mails: amqp://shop:***@127.0.0.1:{port}/?queue=mails cannot be reached: " in said and "refused" in said
    again = folder.keywise("status", "--pipeline", "mails", "--json", app="torn:app")
    [mails] = again.json["pipelines"]
    assert (again.status, mails["keys"], mails["dead"]) == (1, 1, 1)
    assert [("cause" in source, source["depth"]) for source in mails["sources"]] == [(False, 0), (True, None)]


def test_a_send_to_a_server_that_is_away_says_what_may_be_missing(folder):
    folder.write("shop.py", AWAY)
    answer = folder.keywise("send", "pages", '{"id": "a", "v": 1}')
    expect(answer, 1, "127.0.0.1:1")
    assert answer.err.endswith(
        "; sent 0 messages; the others may or may not have been sent: "
        "send them again, the same version twice changes nothing\n"
    )
    assert "nothing is lost" not in answer.err


AWAY = """
import keywise

app = keywise.App("sqlite:///shop.db")
pages = app.pipeline("pages", key="id", version="v")
pages.source("amqp://shop@127.0.0.1:1/?queue=pages")
pages.apply(lambda change: None)
"""
