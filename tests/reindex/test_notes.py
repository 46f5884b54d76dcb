"""Whatever keys and causes a run meets, its progress fits into the note of a position."""

import random

import msgspec
import pytest

from keywise.core.change import KEY_MAX_BYTES
from keywise.core.entry import NOTE_MAX_BYTES
from keywise.reindex.comparison import NAMED_MAX
from keywise.reindex.shards import CatchUpProgress

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
