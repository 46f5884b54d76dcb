"""Whatever a producer sends becomes a dead letter with its cause and its body, and takes no neighbour with it."""

from datetime import datetime

import msgspec
import pytest

import keywise
from app.shop import WAYS, Shop
from keywise.core.errors import SettingsError
from running import run

BODY_MAX = 60_000


def body(**fields: object) -> bytes:
    return msgspec.json.encode(fields)


BAD_BODIES = {
    "nothing": (b"", "truncated"),
    "half an object": (b'{"key": "a", "ver', "truncated"),
    "no JSON": (b"key=a", "malformed"),
    "no object": (b"[1, 2]", "array"),
    "only a number": (b"5", "int"),
    "invalid UTF-8": (b'{"key": "a\xff", "version": 1}', "utf"),
    "no key": (body(version=1), "`key`"),
    "no version": (body(key="a"), "`version`"),
    "key of a wrong type": (body(key=5, version=1), "$.key"),
    "key that is null": (body(key=None, version=1), "$.key"),
    "version of a wrong type": (body(key="a", version=[1]), "$.version"),
    "version that is no time": (body(key="a", version="soon"), "$.version"),
    "version that is true": (body(key="a", version=True), "$.version"),
    "version that is null": (body(key="a", version=None), "$.version"),
    "version with a fraction": (body(key="a", version=1.5), "$.version"),
    "version above 64 bits": (body(key="a", version=2**63), "$.version"),
    "version below 64 bits": (b'{"key": "a", "version": -9223372036854775809}', "$.version"),
    "version beyond all bounds": (b'{"key": "a", "version": 1' + b"0" * 400 + b"}", "$.version"),
    "version that is no number": (b'{"key": "a", "version": NaN}', "malformed"),
    "version without a time zone": (body(key="a", version="2026-01-01T00:00:00"), "time zone"),
    "empty key": (body(key="", version=1), "key is empty"),
    "key of 513 bytes": (body(key="k" * 513, version=1), "513 bytes"),
    "key of 514 bytes in 257 letters": (body(key="é" * 257, version=1), "514 bytes"),
    "key with NUL": (body(key="a\0b", version=1), "NUL"),
    "key with half a character": (b'{"key": "a\\ud800", "version": 1}', "surrogate"),
    "body over the limit": (body(key="a", version=1, text="x" * BODY_MAX), f"over the limit of {BODY_MAX}"),
    "deep nesting": (b'{"key": "a", "version": 1, "x": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", "recursion"),
}

GOOD_KEYS = ["k" * 512, "é" * 256, "🦉", "a b", "null", "'", '"', "\\", "\n", "-1"]


def mixture() -> list[bytes]:
    """Each bad body between two good ones, and good ones at the edge of what is allowed."""
    bodies = [body(key="first", version=1)]
    for number, (bad, _) in enumerate(BAD_BODIES.values()):
        bodies += [bad, body(key=f"good {number}", version=number)]
    bodies += [body(key=key, version=7) for key in GOOD_KEYS]
    bodies += [body(key="lowest", version=-(2**63)), body(key="highest", version=2**63 - 1)]
    return bodies


def applied_by_mixture() -> dict[str, int]:
    edges = {"first": 1, "lowest": -(2**63), "highest": 2**63 - 1}
    return edges | {f"good {number}": number for number in range(len(BAD_BODIES))} | dict.fromkeys(GOOD_KEYS, 7)


@pytest.mark.parametrize("way", WAYS)
def test_bad_bodies_become_dead_letters_and_their_neighbours_are_applied(tmp_path, way):
    shop = Shop(tmp_path)
    shop.pipeline(way, body_max_bytes=BODY_MAX)

    async def main():
        await shop.app.send("shop", *mixture())
        await shop.work_until_empty()
        async with shop.opened() as pipeline:
            assert [found for _, found in shop.app.strategies(pipeline)] == [way]
        letters = await shop.letters()
        await shop.app.close()
        return letters

    letters = run(main())
    assert applied_by_mixture() == shop.content()
    assert [bad for bad, _ in BAD_BODIES.values()] == [letter.body for letter in letters]
    for letter, (name, (_, cause)) in zip(letters, BAD_BODIES.items(), strict=True):
        assert cause in letter.cause.lower() or cause in letter.cause, (name, letter.cause)
        assert (letter.key, letter.version) == ("", None), name
        assert letter.source.startswith("sqlite:///")
        assert letter.sent_at > 0


class Unprintable(Exception):
    """An error whose text holds half a character, as a file name can."""

    def __str__(self) -> str:
        return "cannot read \udcff"


def read(said: dict) -> keywise.Put | keywise.Delete | keywise.Ignore:
    """A read function that makes every mistake one can make, on request."""
    mistakes = {
        "half a character": lambda: keywise.Put("a\ud800", 1),
        "number as key": lambda: keywise.Put(5, 1),
        "bytes as key": lambda: keywise.Put(b"a", 1),
        "key too long": lambda: keywise.Put("k" * 513, 1),
        "version too high": lambda: keywise.Put("a", 2**63),
        "version is text": lambda: keywise.Put("a", "soon"),
        "version is true": lambda: keywise.Put("a", True),
        "version is a fraction": lambda: keywise.Put("a", 1.5),
        "version without a time zone": lambda: keywise.Put("a", datetime(2026, 1, 1)),  # noqa: DTZ001
        "nothing": lambda: None,
        "text": lambda: "a",
        "error": lambda: said["missing"],
    }
    if said.get("say") == "ignore":
        return keywise.Ignore("not ours")
    return mistakes[said["say"]]() if "say" in said else keywise.Put(said["key"], said["version"])


BAD_READS = {
    "half a character": "surrogate",
    "number as key": "must be text",
    "bytes as key": "must be text",
    "key too long": "513 bytes",
    "version too high": "64 bits",
    "version is text": "RFC 3339",
    "version is true": "whole number",
    "version is a fraction": "whole number",
    "version without a time zone": "time zone",
    "nothing": "return Put, Delete or Ignore",
    "text": "return Put, Delete or Ignore",
    "error": "KeyError: 'missing'",
}


@pytest.mark.parametrize("way", WAYS)
def test_mistakes_of_a_read_function_become_dead_letters(tmp_path, way):
    shop = Shop(tmp_path)
    shop.pipeline(way, read=read)

    async def main():
        for number, name in enumerate(BAD_READS):
            await shop.app.send("shop", {"say": name}, {"key": f"k{number}", "version": 1}, {"say": "ignore"})
        await shop.work_until_empty()
        letters = await shop.letters()
        await shop.app.close()
        return letters

    letters = run(main())
    assert {f"k{number}": 1 for number in range(len(BAD_READS))} == shop.content()
    assert [body(say=name) for name in BAD_READS] == [letter.body for letter in letters]
    for letter, (name, cause) in zip(letters, BAD_READS.items(), strict=True):
        assert cause in letter.cause, (name, letter.cause)


@pytest.mark.parametrize("way", WAYS)
def test_an_error_with_half_a_character_in_its_text_is_a_dead_letter_too(tmp_path, way):
    shop = Shop(tmp_path)

    def read_badly(said: dict) -> keywise.Put:
        if said["key"] == "bad":
            raise Unprintable
        return keywise.Put(said["key"], said["version"])

    shop.pipeline(way, read=read_badly)

    async def main():
        await shop.app.send("shop", {"key": "bad", "version": 1}, {"key": "good", "version": 1})
        await shop.work_until_empty()
        letters = await shop.letters()
        await shop.app.close()
        return letters

    [letter] = run(main())
    assert "cannot read" in letter.cause
    assert shop.content() == {"good": 1}


@pytest.mark.parametrize("way", WAYS)
def test_versioned_and_unversioned_changes_of_one_key_do_not_mix(tmp_path, way):
    shop = Shop(tmp_path)

    def read_either(said: dict) -> keywise.Put:
        return keywise.Put(said["key"], said.get("version"))

    shop.pipeline(way, read=read_either)

    async def main():
        await shop.app.send("shop", {"key": "a", "version": 5}, {"key": "b"})
        await shop.work_until_empty()
        await shop.app.send("shop", {"key": "a"}, {"key": "b", "version": 1}, {"key": "b"}, {"key": "c", "version": 1})
        await shop.work_until_empty()
        letters = await shop.letters()
        await shop.app.close()
        return letters

    letters = run(main())
    assert sorted(letter.key for letter in letters) == ["a", "b"]
    assert all("versioned and unversioned" in letter.cause for letter in letters)
    assert shop.content().keys() == {"a", "b", "c"}


def test_what_the_table_refuses_is_set_aside_alone(tmp_path):
    """One bad row in a batch of good ones: the batch is halved until the bad one is found."""
    shop = Shop(tmp_path)
    shop.execute("create table stock (key text primary key, version integer, title text check (length(title) < 5))")
    pipeline = shop.app.pipeline("shop", key="key", version="version", poll="50ms")
    pipeline.source(shop.url).sink(f"{shop.url}?table=stock&columns=title")

    async def main():
        bodies = [{"key": f"k{number}", "version": 1, "title": "ok"} for number in range(200)]
        bodies[77]["title"] = bodies[150]["title"] = "too long"
        bodies[151]["title"] = 2**70
        await shop.app.send("shop", *bodies)
        await shop.work_until_empty()
        letters = await shop.letters()
        await shop.app.close()
        return letters

    letters = run(main())
    assert sorted(letter.key for letter in letters) == ["k150", "k151", "k77"]
    assert all("table stock refuses it" in letter.cause for letter in letters)
    assert {letter.traceback for letter in letters} == {""}, "no code of the user's was called"
    assert {f"k{number}" for number in range(200)} - {"k77", "k150", "k151"} == shop.content().keys()


@pytest.mark.parametrize("way", WAYS[:2])
def test_text_that_the_table_cannot_hold_is_set_aside(tmp_path, way):
    """Only key and version are read from a body on its way, so a broken text beside them is found by the table."""
    shop = Shop(tmp_path)
    shop.pipeline(way)
    broken = b'{"key": "bad", "version": 1, "text": "\xff"}'

    async def main():
        await shop.app.send("shop", {"key": "a", "version": 1}, broken, {"key": "b", "version": 1})
        await shop.work_until_empty()
        letters = await shop.letters()
        await shop.app.close()
        return letters

    [letter] = run(main())
    assert (letter.key, letter.version, letter.body) == ("bad", 1, broken)
    assert shop.content() == {"a": 1, "b": 1}


SETTINGS = {
    "an unknown setting": ({"leese": "5s"}, "did you mean lease"),
    "a setting of another library": ({"max_retries": 3}, "known are"),
    "a margin that leaves too little": ({"lease": "10s", "margin": "5s"}, "has to be below half"),
    "a retention below the redelivery": ({"retention": "10m"}, "raise retention, or lower redelivery"),
    "a runtime below the lease": ({"lease": "60s", "runtime_max": "30s"}, "raise it"),
    "a prefetch below the batch": ({"prefetch": 10}, "raise prefetch"),
    "a duration of zero": ({"lease": 0}, "above zero"),
    "a duration without a unit": ({"lease": "30"}, "write for example 500ms"),
    "a negative count": ({"attempts_max": -1}, "above zero"),
    "no key": ({"key": None}, "either key="),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_cannot_work_are_refused_with_the_fix(case):
    options, fix = SETTINGS[case]
    app = keywise.App("sqlite:///unused.db")
    with pytest.raises(SettingsError, match=fix):
        app.pipeline("shop", **({"key": "key", "version": "version"} | options))


def test_a_lease_longer_than_the_visibility_is_refused_at_start(tmp_path):
    shop = Shop(tmp_path)
    pipeline = shop.app.pipeline("shop", key="key", version="version", lease="90s")
    pipeline.source(f"{shop.url}?visibility=60s").sink(f"{shop.url}?table=stock")
    with pytest.raises(SettingsError, match="set visibility=180s on the source, or a shorter lease"):
        run(shop.app.run(handle_signals=False))


def test_an_app_that_is_not_finished_is_refused_at_start(tmp_path):
    shop = Shop(tmp_path)
    with pytest.raises(SettingsError, match="has no pipeline"):
        run(shop.app.run(handle_signals=False))
    pipeline = shop.app.pipeline("shop", key="key")
    with pytest.raises(SettingsError, match="has no sink"):
        run(shop.app.run(handle_signals=False))
    pipeline.sink(f"{shop.url}?table=stock")
    with pytest.raises(SettingsError, match="has no source"):
        run(shop.app.run(handle_signals=False))
    with pytest.raises(SettingsError, match="has a sink already"):
        pipeline.sink(f"{shop.url}?table=other")
    with pytest.raises(SettingsError, match="no pipeline is called 'shelf'; this app has: shop"):
        run(shop.app.run("shelf", handle_signals=False))


def test_a_sink_in_another_file_than_the_ledger_is_refused(tmp_path):
    shop = Shop(tmp_path)
    pipeline = shop.app.pipeline("shop", key="key", version="version")
    pipeline.source(shop.url).sink(f"sqlite:///{tmp_path}/other.db?table=stock")
    with pytest.raises(SettingsError, match="use the same file in both URLs"):
        run(shop.app.run(handle_signals=False))


def test_a_name_that_cannot_be_a_table_is_refused(tmp_path):
    shop = Shop(tmp_path)
    pipeline = shop.app.pipeline("shop", key="key", version="version").source(shop.url)
    pipeline.sink(f"{shop.url}?table=stock%22%3B%20drop")
    with pytest.raises(SettingsError, match="letters, digits and _"):
        run(shop.app.run(handle_signals=False))


def test_a_table_that_does_not_fit_is_refused_at_start(tmp_path):
    shop = Shop(tmp_path)
    shop.execute("create table stock (name text, price integer)")
    shop.app.pipeline("shop", key="key", version="version").source(shop.url).sink(f"{shop.url}?table=stock")
    with pytest.raises(SettingsError, match=r"needs a unique key column.*or name others with \?key="):
        run(shop.app.run(handle_signals=False))
