"""What an operator asks: the figures of a pipeline, and the story of one key with what would happen to it next."""

from collections.abc import Iterator, Sequence

import msgspec

from keywise.change import VERSION_MAX, VERSION_MIN, Order, Want, is_unversioned, order_of
from keywise.consumer import way_of
from keywise.pipeline import Pipeline, is_atomic
from keywise.protocols import Grade
from keywise.rules import Entry, Policy, Terms, decide

LETTERS_MAX = 1000
"""A key's dead letters are looked for among so many of the newest."""


class SourceFigures(msgspec.Struct, frozen=True):
    """One source of a pipeline: how its batches go, and how many messages it holds."""

    source: str
    way: str
    depth: int


class Figures(msgspec.Struct, frozen=True):
    """A pipeline in figures."""

    pipeline: str
    grade: Grade
    sources: list[SourceFigures]
    keys: int
    tombstones: int
    claims: int
    suspects: int
    dead: int


class Mark(msgspec.Struct, frozen=True):
    """The newest committed change of a key."""

    era: int
    version: int | None
    generation: int
    deleted: bool
    at: float | None
    """None: something else happened to the key since, and only that moment is remembered."""
    kept_until: float | None
    """The first moment at which a prune may forget it; None: never."""


class Holder(msgspec.Struct, frozen=True):
    """Who works on the key, or did when it died."""

    owner: str
    token: int
    since: float
    until: float
    is_over: bool
    gave_up: bool
    """It lives and does not know what became of its write: the lease has to run out."""
    alone: bool
    intent: int | None
    """The version that it is about to write, where that makes older changes wait."""


class UnknownWrite(msgspec.Struct, frozen=True):
    """A write that may be in the sink without being committed; older changes wait for it."""

    version: int | None
    until: float


class Tries(msgspec.Struct, frozen=True):
    """Failed tries at one version, and deaths of workers that were alone with it."""

    version: int | None
    attempts: int
    attempts_max: int
    crashes: int
    crashes_max: int
    next_at: float | None
    """Not before; None: as soon as its message comes back."""


class Suspicion(msgspec.Struct, frozen=True):
    """The sink may hold something else than the mark says."""

    count: int
    since: float
    repair_at: float | None
    """Not before; None: this pipeline has no refetch, so nobody repairs it."""


class BuriedLetter(msgspec.Struct, frozen=True):
    """A dead letter of the key."""

    number: int
    at: float
    version: int | None
    cause: str


class Meeting(msgspec.Struct, frozen=True):
    """What changes between two versions would meet now; None stands for no limit on that side."""

    lowest: int | None
    highest: int | None
    answer: str
    """`granted`, or one of the refusals in `rules.Answer`."""
    wait_s: float = 0.0
    versioned: bool = True
    """False: this is about changes without a version."""


class Story(msgspec.Struct, frozen=True):
    """All that a pipeline knows of one key; moments are seconds of the wall clock."""

    pipeline: str
    grade: Grade
    key: str
    now: float
    mark: Mark | None
    holder: Holder | None
    unknown: UnknownWrite | None
    tries: Tries | None
    suspicion: Suspicion | None
    letters: list[BuriedLetter]
    letters_are_all: bool
    """False: there are so many dead letters that only the newest were looked at."""
    next: list[Meeting]


async def figures_of(pipeline: Pipeline) -> Figures:
    """Count what is queued, remembered and set aside."""
    sources = [
        SourceFigures(name, way_of(pipeline, source).value, await source.depth()) for name, source in pipeline.sources
    ]
    census = await pipeline.operator.census()
    return Figures(
        pipeline=pipeline.name,
        grade=pipeline.grade,
        sources=sources,
        keys=census.keys,
        tombstones=census.tombstones,
        claims=census.claims,
        suspects=census.suspects,
        dead=census.dead,
    )


async def story_of(pipeline: Pipeline, key: str, wall: float) -> Story | None:
    """Tell what the ledger remembers of a key; None if that is nothing at all. `wall` is the time now."""
    operator = pipeline.operator
    entry, now = await operator.inspect(key), await operator.now()
    newest = await operator.letters(LETTERS_MAX)
    ahead_s = wall - now
    letters = [
        BuriedLetter(number, buried_at + ahead_s, letter.version, letter.cause)
        for number, buried_at, letter in newest
        if letter.key == key
    ]
    if entry is None and not letters:
        return None
    entry = entry or Entry()
    return Story(
        pipeline=pipeline.name,
        grade=pipeline.grade,
        key=key,
        now=wall,
        mark=_mark(entry, pipeline, ahead_s),
        holder=_holder(entry, now, ahead_s),
        unknown=UnknownWrite(_version(entry.unknown), entry.unknown_until + ahead_s) if entry.unknown else None,
        tries=_tries(entry, pipeline, ahead_s),
        suspicion=_suspicion(entry, pipeline, ahead_s),
        letters=letters,
        letters_are_all=len(newest) < LETTERS_MAX,
        next=meetings(entry, now, Policy(redelivery_s=pipeline.settings.redelivery_s), _terms(pipeline)),
    )


def meetings(entry: Entry, now: float, policy: Policy, terms: Terms | None) -> list[Meeting]:
    """What a change would meet now, from the lowest version to the highest; equal answers are told together."""
    if any(is_unversioned(order) for order in _named(entry)):
        return list(_meetings_without_version(entry, now, policy, terms))
    found: list[Meeting] = []
    for version in _telling_versions(entry):
        meeting = _meet(entry, version, now, policy, terms)
        last = found[-1] if found else None
        if last is not None and (last.answer, last.wait_s) == (meeting.answer, meeting.wait_s):
            found[-1] = msgspec.structs.replace(last, highest=version)
        else:
            found.append(meeting)
    found[0] = msgspec.structs.replace(found[0], lowest=None)
    found[-1] = msgspec.structs.replace(found[-1], highest=None)
    return found


def _telling_versions(entry: Entry) -> Sequence[int]:
    """Each version that the entry names, and its neighbours: between them nothing changes."""
    near = {order[1] + step for order in _named(entry) for step in (-1, 0, 1)} or {0}
    return sorted(version for version in near if VERSION_MIN <= version <= VERSION_MAX)


def _named(entry: Entry) -> list[Order]:
    return [order for order in (entry.mark, entry.intent, entry.unknown, entry.tried) if order is not None]


def _meet(entry: Entry, version: int | None, now: float, policy: Policy, terms: Terms | None) -> Meeting:
    era = entry.mark[0] if entry.mark is not None else 0
    refusal = decide(entry, Want("", order_of(version, era)), now, policy, terms)
    answer, wait_s = (refusal.answer.value, refusal.wait_s) if refusal is not None else ("granted", 0.0)
    return Meeting(version, version, answer, wait_s, versioned=version is not None)


def _meetings_without_version(entry: Entry, now: float, policy: Policy, terms: Terms | None) -> Iterator[Meeting]:
    yield _meet(entry, None, now, policy, terms)
    versioned = _meet(entry, 0, now, policy, terms)
    yield msgspec.structs.replace(versioned, lowest=None, highest=None)


def _terms(pipeline: Pipeline) -> Terms | None:
    """What a worker that is not the holder would ask with; None where batches take no claim."""
    sink = pipeline.sink
    if is_atomic(sink) and not sink.runs_user_code:
        return None
    return Terms(owner="", lease_s=pipeline.settings.lease_s)


def _mark(entry: Entry, pipeline: Pipeline, ahead_s: float) -> Mark | None:
    if entry.mark is None:
        return None
    (era, _, generation), settings = entry.mark, pipeline.settings
    is_idle = Entry(entry.mark, entry.deleted, entry.updated_at) == entry
    touched_at = entry.updated_at + ahead_s
    return Mark(
        era=era,
        version=_version(entry.mark),
        generation=max(0, generation),
        deleted=entry.deleted,
        at=touched_at if is_idle else None,
        kept_until=None if settings.retention_s is None else touched_at + settings.retention_s + settings.redelivery_s,
    )


def _holder(entry: Entry, now: float, ahead_s: float) -> Holder | None:
    if entry.token == 0:
        return None
    return Holder(
        owner=entry.owner,
        token=entry.token,
        since=entry.updated_at + ahead_s,
        until=entry.lease_until + ahead_s,
        is_over=now >= entry.lease_until,
        gave_up=entry.abandoned,
        alone=entry.alone,
        intent=_version(entry.intent),
    )


def _tries(entry: Entry, pipeline: Pipeline, ahead_s: float) -> Tries | None:
    if entry.tried is None or not (entry.attempts or entry.crashes):
        return None
    settings = pipeline.settings
    return Tries(
        version=_version(entry.tried),
        attempts=entry.attempts,
        attempts_max=settings.attempts_max,
        crashes=entry.crashes,
        crashes_max=settings.crashes_max,
        next_at=entry.not_before + ahead_s if entry.not_before else None,
    )


def _suspicion(entry: Entry, pipeline: Pipeline, ahead_s: float) -> Suspicion | None:
    if not entry.suspect:
        return None
    since = entry.suspect_at + ahead_s
    repair_at = since + pipeline.settings.horizon_s if pipeline.refetch is not None else None
    return Suspicion(entry.suspect, since, repair_at)


def _version(order: Order | None) -> int | None:
    return None if order is None or is_unversioned(order) else order[1]
