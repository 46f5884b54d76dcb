"""The operations of a serial store on a book of requests; the stores in memory and in SQLite run them.

Each function is one step on one book, which nobody else changes meanwhile.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from keywise.core.serial import rules
from keywise.core.serial.contract import Answered, Ending, Mode, Record, Reply, Request, Switch, Turn, TurnPolicy


class Hold(msgspec.Struct, frozen=True):
    """Who holds a key, and for how many of its requests."""

    token: int
    owner: str
    turns: int


class TurnBook(Protocol):
    """All requests of one serial function, inside of one step; a record is known by its key and place."""

    function: str
    now: float
    policy: TurnPolicy
    has_news: bool
    """Set when somebody may wait for what was written."""

    def record(self, id: str) -> Record | None:
        """The last one with this id."""

    def put(self, record: Record) -> None:
        """Keep a new one, or what became of one."""

    def next_place(self, key: str) -> int: ...

    def token(self) -> int: ...

    def line(self, key: str) -> Iterable[Record]:
        """Those that wait for a key, in their order."""

    def running(self, key: str, token: int) -> list[Record]:
        """Those with a turn under this token, in their order."""

    def owned(self, owner: str) -> list[Record]:
        """Those with a turn that this owner has, observed ones too."""

    def observed(self, key: str) -> list[Record]:
        """Those that run at once because the key is observed."""

    def has_line(self, key: str) -> bool:
        """Whether any request waits for a key, or has a turn in order."""

    def hold(self, key: str) -> Hold | None: ...

    def set_hold(self, key: str, hold: Hold | None) -> None:
        """A new token also puts the key behind all others that wait for a turn."""

    def free_keys(self) -> Iterable[str]:
        """Keys that nobody holds and somebody waits for, those that had no turn for the longest time first."""

    def lost_holds(self) -> Sequence[tuple[str, Hold]]:
        """Keys that are held by owners who are not alive."""

    def lost_observed(self) -> Sequence[Record]:
        """Those that run at once, of owners who are not alive."""

    def is_alive(self, owner: str) -> bool: ...

    def live(self, owner: str) -> None:
        """The owner was heard of."""

    def switches(self) -> Sequence[Switch]: ...

    def holders(self, spot: rules.Spot) -> Iterable[int]:
        """The tokens of turns on a key of any serial function in this store, observed ones too."""

    def waits_for(self, token: int) -> Iterable[rules.Wish]:
        """Open requests that were asked for from within a turn, of any serial function in this store."""


def ask(book: TurnBook, owner: str, requests: Sequence[Request]) -> list[Reply | Turn | None]:
    book.live(owner)
    return [_ask(book, owner, request) for request in requests]


def _ask(book: TurnBook, owner: str, request: Request) -> Reply | Turn | None:
    record = book.record(request.id)
    known = rules.arrival(record, request)
    if isinstance(known, Reply):
        return known
    if known is rules.Arrival.JOINED and record is not None:
        return _join(book, record, request)
    mode = rules.mode_of(request, book.switches(), book.now, book.has_line(request.key))
    if mode is not request.mode:
        return rules.switched(request, mode)
    if mode is Mode.OBSERVE:
        return _observe(book, owner, request)
    refused = _circle(book, request)
    if refused is not None:
        return refused
    book.put(rules.entered(request, book.next_place(request.key), book.now))
    # Nobody else has to look for what this owner runs by itself.
    book.has_news = book.has_news or request.runner != owner
    return None


def _join(book: TurnBook, record: Record, request: Request) -> Reply | None:
    """Wait for a request that is there, unless it waits for the one who asks."""
    refused = _circle(book, request, record.token)
    if refused is None and request.within:
        book.put(rules.joined(record, request.within))
    return refused


def _circle(book: TurnBook, request: Request, turn: int = 0) -> Reply | None:
    if not request.within:
        return None
    path = rules.circle(((book.function, request.key), turn), request.within, book.holders, book.waits_for)
    return None if path is None else rules.refusal(request, rules.circle_cause(path))


def _observe(book: TurnBook, owner: str, request: Request) -> Turn:
    overlaps = sum(book.is_alive(other.owner) for other in book.observed(request.key))
    record = rules.entered(request, book.next_place(request.key), book.now)
    record = msgspec.structs.replace(record, overlaps=overlaps)
    record = rules.begun(record, book.token(), owner, book.now, book.policy)
    book.put(record)
    return rules.turn_of(record, book.now)


def take(book: TurnBook, owner: str, limit: int, run_max: int) -> list[Turn]:
    book.live(owner)
    free_lost(book)
    turns: list[Turn] = []
    for key in book.free_keys():
        if len(turns) >= limit:
            break
        if not _is_observed(book, key):
            turns += _take(book, key, owner, min(run_max, limit - len(turns)))
    return turns


def _take(book: TurnBook, key: str, owner: str, run_max: int) -> list[Turn]:
    ended, run = rules.run_of(book.line(key), owner, run_max, book.now, book.is_alive)
    for reply in ended:
        _end(book, reply)
    if not run:
        return []
    token = book.token()
    begun = [rules.begun(record, token, owner, book.now, book.policy) for record in run]
    for record in begun:
        book.put(record)
    book.set_hold(key, Hold(token, owner, len(begun)))
    return [rules.turn_of(record, book.now) for record in begun]


def _is_observed(book: TurnBook, key: str) -> bool:
    """Whether one runs that was asked for before the key was switched on."""
    return bool(book.observed(key))


def free_lost(book: TurnBook) -> None:
    """What is held by owners who are not alive is free."""
    for key, hold in book.lost_holds():
        for record in book.running(key, hold.token):
            _lose(book, record)
        book.set_hold(key, None)
        book.has_news = True
    for record in book.lost_observed():
        _lose(book, record)
        book.has_news = True


def _lose(book: TurnBook, record: Record) -> None:
    reply = rules.after_loss(record, book.now, book.policy)
    if reply is None:
        book.put(rules.waiting_again(record))
    else:
        book.put(rules.ended(record, reply, book.now))


def answer(
    book: TurnBook,
    owner: str,
    replies: Sequence[Reply],
    taking: tuple[int, int] = (0, 1),
    requests: Sequence[Request] = (),
    allowed: tuple[rules.Word, ...] = (rules.Word.ENDS, rules.Word.ALREADY),
) -> Answered:
    """End some, ask for some, take some: `taking` is how many turns, and how many in a row."""
    answered, ended = Answered(), list[Record]()
    for reply in replies:
        record = book.record(reply.id)
        word = rules.word_on(record, reply)
        if word not in allowed:
            answered.refused.append(reply.id)
        elif word is rules.Word.ENDS and record is not None:
            book.put(rules.ended(record, reply, book.now))
            _let_go(book, record)
            ended.append(record)
    answered.answers = ask(book, owner, requests)
    if taking[0]:
        answered.turns = take(book, owner, *taking)
    book.has_news = book.has_news or any(_concerns_others(book, owner, record) for record in ended)
    return answered


def _concerns_others(book: TurnBook, owner: str, record: Record) -> bool:
    """Whether somebody else waits for the reply, or for the key."""
    if record.request.runner != owner:
        return True
    key = record.request.key
    return book.hold(key) is None and next(iter(book.line(key)), None) is not None


def renew(book: TurnBook, owner: str, tokens: Sequence[int], before: float | None) -> list[int]:
    book.live(owner)
    owned = book.owned(owner)
    for record in owned:
        if before is not None and record.started_at < before and record.token not in tokens:
            _give_back(book, record)
    mine = {record.token for record in owned}
    return [token for token in tokens if token not in mine]


def give_back(book: TurnBook, owner: str, turns: Sequence[Turn]) -> None:
    book.live(owner)
    for turn in turns:
        record = book.record(turn.request.id)
        if record is not None and record.reply is None and record.token == turn.token:
            _give_back(book, record)


def _give_back(book: TurnBook, record: Record) -> None:
    if record.request.mode is Mode.OBSERVE:
        gone = Reply(id=record.request.id, outcome=Ending.EXPIRED, cause=rules.CALLER_GONE)
        book.put(rules.ended(record, gone, book.now))
    else:
        book.put(rules.given_back(record))
    _let_go(book, record)
    book.has_news = True


def _let_go(book: TurnBook, record: Record) -> None:
    """The key is free with the last request of its holder's."""
    hold = book.hold(record.request.key)
    if hold is not None and hold.token == record.token:
        rest = msgspec.structs.replace(hold, turns=hold.turns - 1)
        book.set_hold(record.request.key, rest if rest.turns else None)


def withdraw(book: TurnBook, owner: str, ids: Sequence[str], outcome: Ending, cause: str) -> list[str]:
    book.live(owner)
    ended = []
    for id in ids:
        record = book.record(id)
        reply = rules.withdrawn(record, outcome, cause) if record is not None else None
        if reply is not None:
            _end(book, reply)
            ended.append(id)
    return ended


def _end(book: TurnBook, reply: Reply) -> None:
    record = book.record(reply.id)
    assert record is not None, "only what is kept can end"
    book.put(rules.ended(record, reply, book.now))
    book.has_news = True
