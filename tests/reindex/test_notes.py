"""Whatever keys and causes a run meets, its progress fits into the note of a position."""

import random
from collections.abc import Callable

import msgspec
import pytest

from keywise.adapters.memory.origin import MemoryOrigin
from keywise.core.change import KEY_MAX_BYTES, Outcome
from keywise.core.entry import NOTE_MAX_BYTES
from keywise.core.errors import OriginError
from keywise.core.origin import CURSOR_MAX_BYTES, Page, Shard
from keywise.flow.handover import IGNORED
from keywise.reindex.comparison import NAMED_MAX
from keywise.reindex.plan import NAME_MAX_BYTES, _check_shards, check_page
from keywise.reindex.row_governor import Pace
from keywise.reindex.shards import POSTPONED, READ, CatchUpProgress, ShardProgress
from running import run

LINES_MAX = 12
"""A gate has fewer lines."""
ALPHABETS = {
    "plain": "abc",
    "accents": "éüß",
    "emoji": "🦊👩‍🚀",
    "quoted": '"\\/',
    "control": "\x00\x01\n\x1f\x7f",
    "lone surrogates": "a\ud800\udcff",
    "mixed": 'a é🦊"\\\x01',
}


def text_of(rng: random.Random, alphabet: str, characters: int) -> str:
    return "".join(rng.choices(alphabet, k=characters))


def key_of(rng: random.Random, alphabet: str) -> str:
    key = text_of(rng, alphabet, rng.choice((1, 40, 200, KEY_MAX_BYTES)))
    return key.encode(errors="ignore")[:KEY_MAX_BYTES].decode(errors="ignore")


def progress_of(rng: random.Random, alphabet: str) -> CatchUpProgress:
    """The progress of a pass that has named as many keys as it may, with all counts as large as they get."""
    keys = [tuple(key_of(rng, alphabet) for _ in range(NAMED_MAX)) for _ in range(4)]
    causes = [text_of(rng, alphabet, rng.choice((0, 100, 600, 3000))) for _ in range(NAMED_MAX)]
    lines = [text_of(rng, alphabet, rng.choice((30, 500, 10_000))) for _ in range(LINES_MAX)]
    many, long = 10**12, 123456789.123456
    return CatchUpProgress(
        *(many,) * 5, *(long, many, many), keys[0], many, keys[1], many, long, many,
        dict(zip(keys[2], causes, strict=True)), keys[3], long, tuple(lines),
    )  # fmt: skip


@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_the_progress_of_a_pass_fits_into_a_note(alphabet: str):
    for seed in range(60):
        progress = progress_of(random.Random(f"{alphabet} {seed}"), ALPHABETS[alphabet])
        note = progress.position.note
        assert len(note) <= NOTE_MAX_BYTES, seed
        kept = msgspec.json.decode(note, type=CatchUpProgress)
        assert (kept.behind, kept.deleted, kept.seconds) == (progress.behind, progress.deleted, progress.seconds)
        assert (len(kept.stuck_keys), len(kept.refused)) == (NAMED_MAX, LINES_MAX)


def test_short_texts_are_kept_as_they_are():
    keys = tuple(f"key {number} é" for number in range(NAMED_MAX))
    progress = CatchUpProgress(failed=dict.fromkeys(keys, "c" * 300), stuck_keys=keys, refused=("r" * 600, "s"))
    assert msgspec.json.decode(progress.position.note, type=CatchUpProgress) == progress


def test_long_keys_that_begin_alike_stay_different():
    keys = tuple(f"{'long ' * 90}{number}" for number in range(NAMED_MAX))
    causes = dict.fromkeys(keys, "c" * 2000)
    progress = CatchUpProgress(failed=causes, stuck_keys=keys, gone_keys=keys, refused=("r" * 9000,))
    kept = msgspec.json.decode(progress.position.note, type=CatchUpProgress)
    assert len(kept.failed) == len(set(kept.stuck_keys)) == NAMED_MAX
    for key, shown in zip(keys, kept.stuck_keys, strict=True):
        begin, end = shown.split("…")
        assert key.startswith(begin) and key.endswith(end)


LARGEST = dict.fromkeys((*map(str, Outcome), READ, POSTPONED, IGNORED), 10**12)


def shard_note(shard: Shard, after: str) -> bytes:
    """The note of a shard that has read more rows, and goes on more slowly, than any does."""
    pace = Pace(0.1234567890123456, 1234567.1234567, 1234567.1234567)
    return ShardProgress(shard, after=after, pages=10**12, counts=LARGEST, pace=pace, rows_max=10**12).position.note


@pytest.mark.parametrize("alphabet", [name for name in ALPHABETS if name != "lone surrogates"])
def test_the_progress_of_any_shard_that_is_accepted_fits_into_a_note(alphabet: str):
    def longest(size: int, is_accepted: Callable[[str], bool]) -> str:
        text = (ALPHABETS[alphabet] * size)[:size]
        while not is_accepted(text):
            text = text[:-1]
        return text

    def accepts_bounds(bounds: str) -> bool:
        return is_silent(lambda: _check_shards([Shard("s", bounds)]))

    def accepts_name(name: str) -> bool:
        return is_silent(lambda: _check_shards([Shard(name)]))

    def accepts_cursor(after: str) -> bool:
        return is_silent(lambda: check_page(Page([], after, is_last=False), "before"))

    bounds, after = longest(CURSOR_MAX_BYTES, accepts_bounds), longest(CURSOR_MAX_BYTES, accepts_cursor)
    name = longest(NAME_MAX_BYTES, accepts_name)
    assert len(shard_note(Shard(name, bounds, 10**12), after)) <= NOTE_MAX_BYTES


def is_silent(check: Callable[[], None]) -> bool:
    try:
        check()
    except OriginError:
        return False
    return True


@pytest.mark.parametrize("size", [40, 200, 512, 2500])
@pytest.mark.parametrize("alphabet", [name for name in ALPHABETS if name != "lone surrogates"])
def test_a_table_with_any_keys_is_read_with_bounds_and_cursors_that_fit(alphabet: str, size: int):
    keys = [f"{number:02}{(ALPHABETS[alphabet] * size)[:size]}" for number in range(20)] + ["31", "32", "33"]
    origin = MemoryOrigin({key: key.encode() for key in keys})

    async def story() -> list[bytes]:
        read, shards = list[bytes](), await origin.shards(4)
        _check_shards(shards)
        for shard in shards:
            after, is_last = "", False
            while not is_last:
                page = await origin.scan(shard, after, 3)
                check_page(page, after)
                after, is_last = page.after, page.is_last
                read += page.rows
                assert len(shard_note(shard, after)) <= NOTE_MAX_BYTES
        return read

    assert run(story()) == sorted(key.encode() for key in keys)
