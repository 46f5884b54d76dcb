"""A URL that cannot work is refused before anything is opened, with the URL that would, and never with its password."""

import pytest

import keywise
from keywise.core.errors import AddressError, SettingsError
from running import run

BAD_LEDGERS = {
    "shop.db": "is no URL; write for example sqlite:///shop.db",
    "sqlite:shop.db": "is no URL",
    "": "is no URL",
    "sqlite://shop.db": r"two slashes where a file needs three; write sqlite:///shop.db",
    "sqlite://": "names no file",
    "sqlite:///": "names no file",
    "sqllite:///shop.db": "did you mean sqlite://",
    "oracle://shop": "known are: memory, postgres, postgresql, redis, rediss, sqlite",
    "sqlite:///shop.db?mode=ro": "unknown option 'mode'; known are: none",
}


def running(app: keywise.App) -> None:
    run(app.run(handle_signals=False))


@pytest.mark.parametrize("url", BAD_LEDGERS)
def test_a_ledger_that_cannot_work_is_refused_with_the_fix(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AddressError, match=BAD_LEDGERS[url]):
        app = keywise.App(url)
        app.pipeline("shop", key="key").source("memory://").sink("memory://?grade=plain")
        running(app)
    assert list(tmp_path.iterdir()) == [], "something was opened"


@pytest.mark.parametrize(
    ("source", "sink", "fix"),
    [
        ("sqlite:///shop.db?visible=5s", "sqlite:///shop.db", "did you mean visibility"),
        ("sqlite:///shop.db?visibility=5", "sqlite:///shop.db", "write for example 500ms"),
        ("sqlite:///shop.db?queue=a&colour=red", "sqlite:///shop.db", "known are: queue, visibility"),
        ("sqlite:///shop.db", "sqlite:///shop.db?tabel=stock", "did you mean table"),
        ("sqlite:///shop.db", "sqlite:///shop.db?columns=a,b%20c", "letters, digits and _"),
        ("sqlite:///shop.db", "sqlite:///shop.db?table=keywise_marks", "start neither with keywise_"),
        ("sqlite:///shop.db", "memory://?grade=best", "write atomic, conditional or plain"),
        ("sqlite:///shop.db", "memory://", "has to live in the ledger's database"),
        ("stomp://localhost/q", "sqlite:///shop.db", "no source understands stomp://"),
    ],
)
def test_a_source_or_sink_that_cannot_work_is_refused_with_the_fix(source, sink, fix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    app = keywise.App("sqlite:///shop.db")
    with pytest.raises(SettingsError, match=fix):
        app.pipeline("shop", key="key").source(source).sink(sink)
        running(app)


def test_a_password_is_never_shown():
    app = keywise.App("memory://")
    with pytest.raises(AddressError) as error:
        app.pipeline("shop", key="key").source("stomp://user:s3cret@localhost:5672/q").sink("memory://")
        running(app)
    assert "s3cret" not in str(error.value)
    assert "user:***@localhost:5672" in str(error.value)


def test_a_file_may_have_any_name(tmp_path):
    """A URL is decoded: spaces and question marks in a path are written with percent signs."""
    app = keywise.App(f"sqlite:///{tmp_path}/my%20shop%3F.db")
    app.pipeline("shop", key="key").source(f"sqlite:///{tmp_path}/my%20shop%3F.db").sink(
        f"sqlite:///{tmp_path}/my%20shop%3F.db"
    )

    async def main() -> None:
        async with app.open("shop") as pipeline:
            assert [str(way) for _, way in app.strategies(pipeline)] == ["queue_transaction"]

    run(main())
    assert (tmp_path / "my shop?.db").exists()


def test_a_file_that_is_spelled_in_two_ways_never_loses_the_guarantee(tmp_path, monkeypatch):
    """Two spellings are two openings: the sink is refused with the fix, and a queue goes a safe, slower way."""
    monkeypatch.chdir(tmp_path)
    app = keywise.App("sqlite:///shop.db")
    app.pipeline("sink", key="key").source("sqlite:///shop.db").sink("sqlite:///./shop.db")
    app.pipeline("queue", key="key").source("sqlite:///./shop.db").sink("sqlite:///shop.db")

    async def main() -> list[str]:
        with pytest.raises(SettingsError, match="use the same file in both URLs"):
            await app.run("sink", handle_signals=False)
        async with app.open("queue") as pipeline:
            return [str(way) for _, way in app.strategies(pipeline)]

    assert run(main()) == ["ledger_transaction"]


def test_an_absolute_path_may_be_written_with_four_slashes(tmp_path):
    app = keywise.App(f"sqlite:////{str(tmp_path).lstrip('/')}/shop.db")
    app.pipeline("shop", key="key").source(app.ledger_url).sink(app.ledger_url)

    async def main() -> None:
        async with app.open("shop"):
            pass

    run(main())
    assert (tmp_path / "shop.db").exists()
