"""What a simulation of a handler found, as text: what the store should hold, what it holds, and why."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from keywise.testing.handlers.call_log import TraceLine, Watch

LINES_MAX = 24
DIFFERENCES_MAX = 5
TEXT_MAX = 300
WIDTH = 100
DECISIVE = (
    "runs the handler",
    " dies",
    "stops for",
    "goes on",
    "is lost",
    "skipped: something newer",
    "written over",
    "dead letter",
    "is committed and acked",
)

REPEATED = (
    "The handler ran more than once for one change. "
    "A worker can always crash between an effect and its commit, so the handler must allow for it: "
    "write the state that the change carries instead of adding to the stored state, "
    "or ask for the Transaction, so that effect and commit are one step."
)
SKIPPED = (
    "Older versions were skipped, because a newer one came first. "
    "A change carries the whole state of its key, so a handler must not rely on seeing every version."
)
LATE = (
    "A worker was stopped just before its write, and wrote when it resumed, long after its claim had expired. "
    "Store claim.token with each key and refuse a write with a lower one, or ask for the Transaction."
)
REMEMBERED = (
    "No change was handled twice and none was skipped. "
    "So the handler keeps state between calls, or reset does not empty the whole store."
)


LEFT_OUT = "more lines are left out"


class StateDifference(msgspec.Struct, frozen=True):
    """A place where the store does not hold what it should."""

    where: str
    """A key of the state; empty if the state is not a mapping."""
    wanted: str
    held: str


class Finding(msgspec.Struct, frozen=True):
    """One thing that is wrong with a handler, and a seed that shows it."""

    seed: int | None
    """None if the handler failed without any fault."""
    what: str
    differences: list[StateDifference] = []
    key: str | None = None
    """The key of the story."""
    story: list[str] = []
    advice: str = ""

    @property
    def length(self) -> int:
        """The length of the story; a shortened one counts as longer than all complete ones."""
        return len(self.story) + (LINES_MAX if self.story and LEFT_OUT in self.story[-1] else 0)

    def __str__(self) -> str:
        lines = [f"{'Without any fault' if self.seed is None else f'Seed {self.seed}'}: {self.what}"]
        for one in self.differences:
            place = f"{one.where} " if one.where else ""
            lines += [f"  {place}should be  {one.wanted}", f"  {' ' * len(place)}but is     {one.held}"]
        if self.story:
            lines += ["", f"What happened{f' to {self.key!r}' if self.key is not None else ''}:"]
            lines += [f"  {line}" for line in self.story]
        if self.advice:
            lines += ["", textwrap.fill(self.advice, WIDTH)]
        return "\n".join(lines)


class SimulationReport(msgspec.Struct):
    """What a simulation found. It is true if it found nothing, and prints as text."""

    pipeline: str
    grade: str
    messages: int
    keys: int
    seeds: int = 0
    calls: int = 0
    """Calls of the handler in all seeds together."""
    faults: dict[str, int] = {}
    """How often each kind of fault was injected."""
    set_aside: list[str] = []
    """Messages that become dead letters even without any fault."""
    findings: list[Finding] = []
    """One for each seed that failed, the shortest story first."""

    def __bool__(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        counts = ((self.messages, "message"), (self.keys, "key"), (self.seeds, "seed"), (self.calls, "call"))
        messages, keys, seeds, calls = (f"{number:,} {noun if number == 1 else noun + 's'}" for number, noun in counts)
        lines = [f"{self.pipeline} ({self.grade}): {messages} of {keys}, {seeds}, {calls} of the handler"]
        if self.faults:
            lines.append("faults: " + ", ".join(f"{kind} {count}" for kind, count in sorted(self.faults.items())))
        lines += [f"set aside also without any fault: {one}" for one in self.set_aside]
        if not self.findings:
            return "\n".join([*lines, "The store ends up right in every seed."])
        first = self.findings[0]
        if first.seed is not None:
            wrong = sorted(one.seed for one in self.findings if one.seed is not None)
            named = ", ".join(map(str, wrong[:10])) + (", …" if len(wrong) > 10 else "")
            lines.append(f"The store does not end up right in {len(wrong)} of {seeds}: {named}")
        return "\n".join([*lines, "", str(first)])


def differences(wanted: Any, held: Any) -> list[StateDifference]:
    """List where two states differ, key by key if they are mappings."""
    if not isinstance(wanted, Mapping) or not isinstance(held, Mapping):
        return [StateDifference("", shortened(wanted), shortened(held))]
    found = []
    for key in dict.fromkeys((*wanted, *held)):
        one, other = (shortened(state[key]) if key in state else "nothing" for state in (wanted, held))
        if key not in wanted or key not in held or wanted[key] != held[key]:
            found.append(StateDifference(shortened(key), one, other))
    return found[:DIFFERENCES_MAX]


def explain_difference(wanted: Any, held: Any, keys: Sequence[str], watch: Watch) -> tuple[str | None, list[str], str]:
    """Return the key whose story explains a difference, the story, and advice."""
    key = _key_of(wanted, held, keys, watch)
    lines = watch.story(key)
    return key, _shortened_story(lines), _advice(lines)


def _shortened_story(lines: Sequence[TraceLine]) -> list[str]:
    """Return all lines, or only the decisive ones if there are too many, or only the first and the last of these."""
    kept = lines
    if len(kept) > LINES_MAX:
        kept = [line for line in lines if any(word in line.text for word in DECISIVE)]
    texts = [f"{line.at:8.3f} s  {line.text}" for line in kept]
    if len(texts) > LINES_MAX:
        half = LINES_MAX // 2
        texts = [*texts[:half], "…", *texts[-half:]]
    left_out = len(lines) - len(texts)
    return [*texts, f"({left_out} {LEFT_OUT})"] if left_out > 0 else texts


def shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= TEXT_MAX else f"{text[:TEXT_MAX]}…"


def _key_of(wanted: Any, held: Any, keys: Sequence[str], watch: Watch) -> str | None:
    """Return a key that the state itself names, otherwise one to which something happened."""
    if isinstance(wanted, Mapping) and isinstance(held, Mapping):
        different = [
            key for key in (*wanted, *held) if wanted.get(key) != held.get(key) or (key in wanted) != (key in held)
        ]
        named = [str(key) for key in different if str(key) in keys]
        if named:
            return min(named, key=lambda key: (len(watch.story(key)), key))
    eventful = [key for key in keys if _advice(watch.story(key)) is not REMEMBERED]
    return min(eventful, key=lambda key: (_is_only_skipped(watch.story(key)), len(watch.story(key)), key), default=None)


def _is_only_skipped(lines: Sequence[TraceLine]) -> bool:
    return _advice(lines) is not REPEATED


def _advice(lines: Sequence[TraceLine]) -> str:
    if any(" is written over " in line.text for line in lines):
        return LATE
    runs = [line.text.partition(" runs the handler for ")[2] for line in lines if " runs the handler for " in line.text]
    if len(set(runs)) < len(runs):
        return REPEATED
    if any("skipped: something newer" in line.text for line in lines):
        return SKIPPED
    return REMEMBERED
