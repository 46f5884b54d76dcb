"""The gate before a swap: what must hold of the other target, line by line, with what to do if it does not."""

import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing

import msgspec

from keywise.core.controls import SAMPLE_KEYS, ReindexRun
from keywise.core.entry import Entry
from keywise.core.errors import MalformedError
from keywise.core.origin import Origin
from keywise.core.sink import Content, ReadableSink
from keywise.core.target import MovableSink
from keywise.flow.pipeline import OpenPipeline
from keywise.operate.reconcile import Difference, Kind, difference
from keywise.reindex.comparison import NAMED_MAX
from keywise.reindex.report import RunReport
from keywise.reindex.shards import POSTPONED, entries_of
from keywise.reindex.sweep import FETCH_KEYS
from keywise.reindex.targets import fault_of_name, letters_command

DEAD = "dead"
REBUILD = "cancel the run, drop the target and build it again"


class GateLine(msgspec.Struct, frozen=True):
    """One thing that must hold before a swap."""

    name: str
    value: str
    is_ok: bool = True
    advice: str = ""
    """What to do if it does not hold."""
    is_transient: bool = False
    """If it does not hold: whether it may hold after another pass, without an operator."""

    @property
    def text(self) -> str:
        return f"{self.name}: {self.value}{f'; {self.advice}' if self.advice else ''}"


class GateResult(msgspec.Struct, frozen=True):
    """What the gate has found for a run."""

    run: ReindexRun
    lines: Sequence[GateLine]

    @property
    def failing(self) -> list[GateLine]:
        return failing(self.lines)

    @property
    def is_open(self) -> bool:
        """Whether the swap may begin."""
        return not self.failing

    @property
    def is_refused(self) -> bool:
        """Whether a line does not hold that needs an operator."""
        return any(not line.is_transient for line in self.failing)


class KeySample:
    """A random sample of keys: each key that was added has the same chance to be in it."""

    def __init__(self, keys_max: int, rng: random.Random) -> None:
        self._keys_max = keys_max
        self._rng = rng
        self._seen = 0
        self._chosen: list[tuple[str, Entry]] = []

    @property
    def entries(self) -> dict[str, Entry]:
        return dict(self._chosen)

    def add(self, key: str, entry: Entry) -> None:
        """Perhaps take a key into the sample, in place of another one if the sample is full."""
        self._seen += 1
        if len(self._chosen) < self._keys_max:
            self._chosen.append((key, entry))
        elif (place := self._rng.randrange(self._seen)) < self._keys_max:
            self._chosen[place] = key, entry


class Gate:
    """Inspects the other target of a run. It changes nothing but the settings that made building it faster."""

    def __init__(self, live: OpenPipeline, other: OpenPipeline, origin: Origin, sample_keys: int) -> None:
        self._live, self._other = live, other
        self._origin = origin
        self._sample_keys = sample_keys
        self._rng = random.Random(live.rng.random())

    async def lines(self, report: RunReport) -> list[GateLine]:
        """Return all lines; the swap may begin if every one holds."""
        run, sink = report.run, self._live.sink
        assert isinstance(sink, MovableSink), "a run beside has started on it"
        faults = await sink.finish_target(run.into)
        lines = [] if run.is_rollback else _rows_of(self._live.name, report, await self._dead_examples(report))
        lines += self._passes(report)
        lines += await self._suspects()
        lines.append(await self._name(run))
        lines += await self._content(run, await sink.count(run.into))
        lines.append(GateLine("target", faults[0] if faults else "ready", not faults, is_transient=True))
        return lines

    def _passes(self, report: RunReport) -> list[GateLine]:
        last, run = report.catch_up, report.run
        pause_s = 2 * last.seconds  # A swap does one more pass and one comparison while changes wait.
        is_short = pause_s <= run.pause_max_s
        resume = f"keywise reindex resume {self._live.name} --delete-max {report.gone}"
        failed = "; ".join(f"{key!r}: {cause}" for key, cause in last.failed.items())
        return [
            _line("passes", f"{last.passes:,}", last.passes > 0, "the first one is under way", is_transient=True),
            _line(
                "lagging",
                _keys(last.stuck, last.stuck_keys),
                not last.stuck,
                "the origin has had older rows than the live target, or none, for longer than the horizon; the swap "
                "waits until it has caught up",
                is_transient=True,
            ),
            _line(
                "gone",
                _keys(report.gone, last.gone_keys if report.gone else ()),
                not report.gone,
                f"the origin does not have them; to delete them, run {resume}",
            ),
            _line(
                "not written",
                _keys(last.unwritten) + (f" ({failed})" if failed else ""),
                last.unwritten <= run.accept_dead,
                "remove the cause"
                if run.is_rollback
                else f"remove the cause, or swap without them with --accept-dead {last.unwritten}",
                is_transient=True,
            ),
            _line(
                "pause",
                f"about {pause_s:.1f} s" + ("" if is_short else f", and changes may wait {run.pause_max_s:g} s"),
                is_short,
                "allow more with --pause-max",
                is_transient=True,
            ),
        ]

    async def _suspects(self) -> list[GateLine]:
        live, other = await self._live.admin.counts(), await self._other.admin.counts()
        suspects = live.suspects + other.suspects
        named = [key for one in (self._live, self._other) for key in await one.admin.suspects(NAMED_MAX, 0.0)]
        is_due = bool((await self._live.control_store.controls()).resync_at)
        return [
            _line(
                "suspect",
                _keys(suspects, named[:NAMED_MAX]),
                not suspects,
                "workers repair them after the horizon",
                is_transient=True,
            ),
            _line(
                "resync",
                "due" if is_due else "not due",
                not is_due,
                "more keys may be wrong than the ledger knows; let upstream send everything again, then run keywise "
                f"repair --resynced --pipeline {self._live.name}",
            ),
        ]

    async def _name(self, run: ReindexRun) -> GateLine:
        fault = await fault_of_name(self._live, run.live)
        advice = f"it was moved by other means; let it stand for {run.live} again"
        return _line("name", fault or f"stands for {run.live}", not fault, advice)

    async def _dead_examples(self, report: RunReport) -> str:
        if not report.dead:
            return ""
        letters = await self._other.admin.dead_letters(NAMED_MAX)
        return "; ".join(f"{letter.key!r}: {letter.cause}" if letter.key else letter.cause for _, _, letter in letters)

    # Content.

    async def _content(self, run: ReindexRun, held: int) -> list[GateLine]:
        """Compare the number of keys in the target with the ledger, and a sample field by field with the origin."""
        rows, sample = 0, KeySample(self._sample_keys, self._rng)
        async for key, entry in self._rows():
            rows += 1
            sample.add(key, entry)
        chosen = sample.entries
        wrong = await self._wrong(run, chosen)
        compared = (
            _count(len(chosen), "key") if isinstance(self._other.sink, ReadableSink) else "the target cannot be read"
        )
        examples = f", wrong: {', '.join(wrong[:NAMED_MAX])}" if wrong else ""
        return [
            _line(
                "keys",
                f"{held:,} in the target, {rows:,} by the ledger",
                held == rows,
                f"something else has changed the target; {REBUILD}",
            ),
            _line(
                "sample",
                compared + examples,
                not wrong,
                f"something else has changed the target, or rows change without a new version; {REBUILD}; a swap "
                f"compares a sample of its own, of {SAMPLE_KEYS} keys unless --sample says how many",
            ),
        ]

    async def _rows(self) -> AsyncIterator[tuple[str, Entry]]:
        """Yield the keys that have a row in the other target, by the ledger."""
        async with aclosing(entries_of(self._other.ledger)) as entries:
            async for key, entry in entries:
                if entry.mark is not None and not entry.deleted:
                    yield key, entry

    async def _wrong(self, run: ReindexRun, sample: Mapping[str, Entry]) -> list[str]:
        if not isinstance(self._other.sink, ReadableSink):
            return []
        wrong, keys = list[str](), list(sample)
        for start in range(0, len(keys), FETCH_KEYS):
            some = keys[start : start + FETCH_KEYS]
            truths, held = await self._origin.fetch(some), await self._other.sink.read(some)
            found = self._differing({key: sample[key] for key in some}, truths, held)
            # Before a rollback, rows may differ from the origin: the pipeline may write them in another way by now.
            wrong += [_described(one) for one in found if not (run.is_rollback and one.kind is Kind.DIFFERENT)]
        return wrong

    def _differing(
        self, entries: Mapping[str, Entry], truths: Mapping[str, bytes], held: Mapping[str, Content]
    ) -> list[Difference]:
        wrong = []
        for key, entry in entries.items():
            try:
                truth = self._live.reader.read_one(truths[key]) if key in truths else None
            except MalformedError as error:
                wrong.append(Difference(key, Kind.FAILED, detail=f"its row cannot be read: {error}"))
                continue
            if truth is not None and truth.key != key:
                detail = f"the origin has returned the row of {truth.key!r} for it"
                wrong.append(Difference(key, Kind.FAILED, detail=detail))
                continue
            assert entry.mark is not None, "only keys with a row are chosen"
            if truth is None or truth.version != entry.mark[1]:
                continue  # The origin has moved on, and the live changes follow.
            if (found := difference(key, truth, held.get(key), entry)) is not None:
                wrong.append(found)
        return wrong


def _described(one: Difference) -> str:
    return f"{one.key!r} ({one.kind.value}{f': {one.detail}' if one.detail else ''})"


def _rows_of(name: str, report: RunReport, dead_examples: str) -> list[GateLine]:
    """Return the lines on the rows that were read, and what became of them."""
    run, dead = report.run, report.dead
    examples = f" ({dead_examples})" if dead_examples else ""
    return [
        _line("shards", f"{report.shards_read:,} of {run.shards:,} read", report.shards_read == run.shards, REBUILD),
        _line("rows", f"{report.rows_read:,} read", report.reconciles, f"their outcomes do not add up; {REBUILD}"),
        _line(
            DEAD,
            _count(dead, "row") + examples,
            dead <= run.accept_dead,
            f"see {letters_command(name, run)}; correct these rows and build the target again, or swap "
            f"without them with --accept-dead {dead}",
        ),
        _line(POSTPONED, _count(report.postponed, "row"), not report.postponed, is_transient=True),
    ]


def _line(name: str, value: str, is_ok: bool, advice: str = "", *, is_transient: bool = False) -> GateLine:
    return GateLine(name, value, is_ok, "" if is_ok else advice, is_transient)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _keys(number: int, some: Sequence[str] = ()) -> str:
    """Format a number of keys, and name some of them."""
    more = ", …" if number > len(some) else ""
    return _count(number, "key") + (f" ({', '.join(map(repr, some))}{more})" if some else "")


def failing(lines: Sequence[GateLine]) -> list[GateLine]:
    return [line for line in lines if not line.is_ok]
