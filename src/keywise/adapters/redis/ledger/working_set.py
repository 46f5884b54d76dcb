"""Some entries of one ledger scope in Redis: read in one step, decided here, and written in a step that compares.

The pure rules decide in Python. What they decided is written only for keys that are, byte for byte, as they were when
they were read; keys that changed meanwhile come back as they are now, and are decided again.
"""

import asyncio
import random
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from keywise.adapters.redis.ledger.entry_encoding import ACTIVE, entry_of, state_of
from keywise.adapters.redis.ledger.scope import RedisScope
from keywise.adapters.redis.ledger.scripts import KEEP, READ, SWAP, SWAP_FREEING
from keywise.core import rules
from keywise.core.controls import PLAIN, Controls, controls_of
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import EMPTY, Entry, LedgerPolicy
from keywise.core.errors import UnavailableError
from keywise.core.key_encoding import encoded

TRIES_MAX = 50
"""How often keys that others keep changing are decided again before the ledger counts as unreachable."""
WAIT_S = 0.001
READ_WITHIN_S = 10.0
"""A decision that is older is not written: a worker may have been stopped between the two steps.

Where keys are forgotten sooner it has to be younger: a key that was not there may have come and gone meanwhile.
"""
TOKEN_NONCE_BITS = 11
ANY_CONTROLS = "*"
LETTERS_MAX = 1_000
LETTER_BYTES_MAX = 64 * 1024 * 1024
"""So many dead letters one step carries at the most; Redis takes 512 MB in one argument, and 1 GB in one command."""

T = TypeVar("T")
R = TypeVar("R")


class RedisWorkingSet(msgspec.Struct):
    """What was read of some keys at one moment, and what becomes of them."""

    policy: LedgerPolicy
    states: dict[str, bytes] = {}
    entries: dict[str, Entry | None] = {}
    rates: dict[str, bytes] = {}
    now: float = 0.0
    """The store's clock."""
    controls: Controls = PLAIN
    controls_text: bytes = b""
    tokens: dict[str, int] = {}
    changed: dict[str, Entry | None] = {}
    letters: dict[str, list[DeadLetter]] = {}
    """To be kept with what becomes of each key."""
    key: str = ""
    """The one that is decided now."""
    read_at: float | None = None
    """None: nothing was read, this worker knows it."""
    is_timed_there: bool = False
    """Marks get the time at which the server writes them."""

    def entry(self, key: str) -> Entry | None:
        return self.changed.get(key, self.entries[key])

    def set(self, key: str, entry: Entry | None) -> None:
        self.changed[key] = entry

    def keep(self, letter: DeadLetter) -> None:
        self.letters.setdefault(self.key, []).append(letter)


class RedisEntries:
    """Reads and writes the entries of one scope."""

    def __init__(self, scope: RedisScope, policy: LedgerPolicy, *, keeps_rates: bool = False) -> None:
        self._scope = scope
        self._policy = policy
        self._keeps_rates = keeps_rates
        """Also those that limit nothing any more."""

    async def read(self, keys: Iterable[str], *, tokens: bool = False) -> RedisWorkingSet:
        """The entries of keys as they are now, and perhaps a fresh token for each."""
        named = {key: encoded(key) for key in keys}
        rated = self._policy.rate is not None
        arguments: list[Any] = [len(named) if tokens else 0, "1" if rated else ""]
        for code in named.values():
            arguments += (self._scope.bucket(code), code)
        answer = await self._scope.call(READ, *arguments)
        seconds, microseconds, seq, controls, first, states, rates = answer
        self._scope.saw(seq)
        working_set = self._working_set(seconds, microseconds, controls)
        for number, key in enumerate(named):
            self._put(working_set, key, states[number], rates[number] if rated else b"")
            if tokens:
                working_set.tokens[key] = (int(first) + number) << TOKEN_NONCE_BITS | secrets.randbits(TOKEN_NONCE_BITS)
        return working_set

    async def run(
        self,
        items: Mapping[str, T],
        step: Callable[[RedisWorkingSet, T], R],
        working_set: RedisWorkingSet | None = None,
        *,
        frees: bool = True,
        under_controls: bool = False,
    ) -> list[R]:
        """Run a step for what is given by key and write it back, again for keys that changed meanwhile.

        Returns what the step returned at last for each key. Without a working set, the keys are read first.
        Under the controls, those must not have changed either.
        """
        if not items:
            return []
        results: dict[str, R] = {}
        working_set = working_set or await self.read(items)
        for attempt in range(TRIES_MAX):
            for key in working_set.states:
                working_set.key = key
                results[key] = step(working_set, items[key])
            working_set = await self._swap(working_set, frees=frees, under_controls=under_controls)
            if not working_set.states:
                return [results[key] for key in items]
            if attempt:
                await asyncio.sleep(random.uniform(0, WAIT_S * attempt))
        raise UnavailableError(f"{self._scope.database.name}: others keep changing the same keys")

    async def keep(self, letters: Iterable[tuple[float | None, DeadLetter]]) -> None:
        """Keep letters that end no claim, each buried at a moment or now; no more than one step carries."""
        arguments: list[Any] = []
        for buried_at, letter in letters:
            arguments += ("" if buried_at is None else repr(buried_at), _encode(letter))
        [seq] = await self._scope.call(KEEP, *arguments)
        self._scope.saw(seq, seq)

    async def _swap(self, working_set: RedisWorkingSet, *, frees: bool, under_controls: bool) -> RedisWorkingSet:
        """Write what became of keys; return those that changed meanwhile as they are now."""
        arguments: list[Any] = []
        keys: list[str] = []
        era = 0
        for key, entry in working_set.changed.items():
            state = state_of(entry)
            if (
                state == working_set.states[key]
                and not working_set.letters.get(key)
                and not self._is_charged(working_set, key, entry)
            ):
                continue
            keys.append(key)
            if entry is not None:
                era = max(era, entry.era, entry.mark[0] if entry.mark is not None else 0)
            arguments += self._item(working_set, key, entry, state)
        if not keys:
            return RedisWorkingSet(self._policy)
        terms = self._terms(working_set, under_controls=under_controls, era=era)
        answer = await self._scope.call(SWAP_FREEING if frees else SWAP, *terms, *arguments)
        seconds, microseconds, seq, controls, own, changed = answer
        self._scope.saw(seq, own)
        fresh = self._working_set(seconds, microseconds, controls)
        fresh.tokens = working_set.tokens
        for number, state, rate in zip(changed[::3], changed[1::3], changed[2::3], strict=True):
            self._put(fresh, keys[number], state, rate)
        return fresh

    def _terms(self, working_set: RedisWorkingSet, *, under_controls: bool, era: int = 0) -> tuple[Any, ...]:
        """What has to hold for anything to be written."""
        read_at = "" if working_set.read_at is None else repr(working_set.read_at)
        controls: Any = b"=" + working_set.controls_text if under_controls else ANY_CONTROLS
        stamp, sweep = "1" if working_set.is_timed_there else "", "" if self._keeps_rates else "1"
        within_s = READ_WITHIN_S
        if self._policy.retention_s is not None:
            within_s = min(within_s, self._policy.retention_s + self._policy.redelivery_s)
        return read_at, controls, within_s, stamp, era, sweep

    def _item(self, working_set: RedisWorkingSet, key: str, entry: Entry | None, state: bytes) -> tuple[Any, ...]:
        code, lease, suspect_since = encoded(key), "", ""
        if entry is not None and state[:1] == ACTIVE:
            lease = repr(entry.lease_until) if entry.token else ""
            since = rules.suspect_since(entry, self._policy)
            suspect_since = repr(since) if since is not None else ""
        before = working_set.entries[key]
        counts = [after - earlier for after, earlier in zip(_counts(entry), _counts(before), strict=True)]
        rate = (b"", b"")
        if self._is_charged(working_set, key, entry):
            assert entry is not None
            rate = (working_set.rates.get(key, b""), repr(entry.rate_at).encode())
        letters = working_set.letters.get(key, ())
        more = _more(counts, rate, letters) if any(counts) or rate[1] or letters else b""
        return self._scope.bucket(code), code, working_set.states[key], state, lease, suspect_since, more

    def _is_charged(self, working_set: RedisWorkingSet, key: str, entry: Entry | None) -> bool:
        """Whether a dispatch was charged since the working_set was read; what limits nothing any more is not kept."""
        if self._policy.rate is None or entry is None or entry.rate_at <= working_set.now:
            return False
        before = working_set.entries[key]
        return before is None or entry.rate_at != before.rate_at

    def _working_set(self, seconds: bytes, microseconds: bytes, controls: bytes) -> RedisWorkingSet:
        now = int(seconds) + int(microseconds) / 1e6
        return RedisWorkingSet(
            self._policy, now=now, read_at=now, controls=controls_of(controls), controls_text=controls
        )

    def _put(self, working_set: RedisWorkingSet, key: str, state: bytes, rate: bytes) -> None:
        entry = entry_of(state)
        if rate and self._policy.rate is not None:
            working_set.rates[key] = rate
            entry = replace(entry or EMPTY, rate_at=float(rate))
        working_set.states[key], working_set.entries[key] = state, entry


def stretches(items: Iterable[T], letter: Callable[[T], DeadLetter]) -> Iterator[list[T]]:
    """Split what holds letters into no more than one step carries."""
    found: list[T] = []
    size = 0
    for item in items:
        more = len(_encode(letter(item)))
        if found and (len(found) >= LETTERS_MAX or size + more > LETTER_BYTES_MAX):
            yield found
            found, size = [], 0
        found.append(item)
        size += more
    if found:
        yield found


def _more(counts: Sequence[int], rate: tuple[bytes, bytes], letters: Iterable[DeadLetter]) -> bytes:
    """What is written besides a state, as `SWAP` reads it."""
    before, after = rate
    parts = [struct.pack(">bbbB", *counts, len(before)), before, struct.pack(">B", len(after)), after]
    for letter in letters:
        packed = _encode(letter)
        parts += (struct.pack(">I", len(packed)), packed)
    return b"".join(parts)


def _counts(entry: Entry | None) -> tuple[int, int, int]:
    """How much an entry adds to the keys, tombstones and suspects of its scope."""
    return (0, 0, 0) if entry is None else (entry.mark is not None, entry.deleted, entry.suspicions > 0)


_encode = msgspec.msgpack.Encoder().encode
