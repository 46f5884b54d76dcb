"""Draws the figures of a run: a block of lines per pipeline in a terminal, or one line for a log."""

from collections.abc import Iterable, Iterator, Sequence

from rich.cells import chop_cells
from rich.text import Text

from keywise.cli.output import count, duration, plain, size, stamp
from keywise.core import events
from keywise.observe.log import described, format_empty, format_held_sweep, format_refused_swap
from keywise.observe.run_view import RARE, WINDOW_S, Notice, ObjectProgress, PipelineView, ReindexProgress

SLOW_SHOWN = 3
OBJECTS_SHOWN = 5
LABEL_WIDTH = 11
NOTICE_LINES = 3
LINE_MAX = 100
"""The most characters for one object in a line of a log."""
KEY_MAX, CAUSE_MAX = 40, 300
"""The most characters of a key and of a cause that are shown; both may come from messages, and be of any length."""
URI_HEAD = 10
"""How many characters of the beginning of a URI are kept when it is cut; if there is no room, only its end is."""

BAD_STYLES = {"dead": "red", "failed attempts": "yellow"}
STATE_STYLES = {"running": "green", "paused": "bold yellow", "draining": "yellow"}


def frame(views: Sequence[PipelineView], width: int, height: int) -> Text:
    """Draw all pipelines that have started, in lines that fit the width.

    If the lines exceed the height, the slowest calls and the warnings are left out. The last line is empty, so that
    text that follows the frame, a prompt for example, begins on its own line.
    """
    views = [view for view in views if view.sources]
    blocks = [list(_block(view, width)) for view in views]
    if sum(map(len, blocks)) >= height:
        blocks = [list(_block(view, width, brief=True)) for view in views]
    lines = [line for block in blocks for line in block]
    if len(lines) >= height:
        lines = [*lines[: max(0, height - 2)], Text("…", "dim")]
    return Text("\n", no_wrap=True).join((*lines, Text()))


def line(view: PipelineView) -> str:
    """Format one pipeline as one line, for logs."""
    ended = [f"{number:,} {outcome}" for outcome, number in view.outcomes.items() if number]
    total = count(view.changes, "change")
    if view.state == "stopped":
        parts = [f"{total} in {span(view.seconds)}, {rate(view.rate_average)}"]
    else:
        rates = (f"{rate(view.rate_now)} now", f"{rate(view.rate_average)} on average")
        parts = [", ".join((total, *rates, *_lag(view)))]
    parts += [", ".join(ended)] if ended else []
    parts += [count(view.failed_attempts, "failed attempt")] if view.failed_attempts else []
    parts += [f"lanes {_lanes(view.lanes)}"] if view.lanes and view.state != "stopped" else []
    parts += [f"reading {', '.join(_objects(view, LINE_MAX))}"] if view.objects else []
    parts += [_reindex(view.reindex)] if view.reindex is not None and view.state != "stopped" else []
    parts += [f"slowest {', '.join(_slowest(view))}"] if view.slowest else []
    parts += [_ledger_down(view.ledger_down)] if view.ledger_down is not None else []
    state = "" if view.state == "running" else f" {view.state},"
    return plain(f"{view.pipeline}:{state} {'; '.join(parts)}")


def rate(changes_a_second: float) -> str:
    """Format a rate: `6,250/s`, and a small one with one decimal."""
    is_small = 0.05 <= changes_a_second < 10
    return f"{changes_a_second:.1f}/s" if is_small else f"{changes_a_second:,.0f}/s"


def span(seconds: float) -> str:
    """Format a duration that may be short: `40 ms`, `1.2 s`, `3 min 5 s`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 10 else duration(seconds)


def _block(view: PipelineView, width: int, *, brief: bool = False) -> Iterator[Text]:
    yield from _packed(_head(view), width, "  ")
    yield from _labelled("rate", _rates(view), width)
    yield from _labelled("changes", _outcomes(view), width)
    if view.lanes is not None and view.state != "stopped":
        yield from _labelled("lanes", _lanes(view.lanes).split(", "), width)
    if view.reindex is not None and view.state != "stopped":
        yield from _labelled("reindex", _reindex(view.reindex).removeprefix("reindex ").split(", "), width)
    if view.ledger_down is not None:
        yield from _labelled("ledger", [Text(_ledger_down(view.ledger_down), "bold red")], width)
    for alarm in view.alarms:
        yield from _format_notice("ALARM", alarm, view.now, width, "bold red")
    if brief:
        return
    yield from _labelled("objects", _objects(view, width - LABEL_WIDTH), width)
    if view.slowest:
        yield from _labelled("slowest", _slowest(view), width)
    for warning in view.warnings:
        yield from _format_notice("warning", warning, view.now, width, "yellow")


def _head(view: PipelineView) -> list[Text]:
    strategies = dict.fromkeys(source["strategy"] for source in view.sources)
    facts = [Text(plain(view.pipeline), "bold"), Text(view.state, STATE_STYLES.get(view.state, "dim"))]
    if view.grade:
        facts.append(Text(plain(view.grade)))
    names = (Text(plain(strategy), "dim") for strategy in strategies)
    return [*facts, *names, Text(duration(round(view.seconds)), "dim")]


def _rates(view: PipelineView) -> list[str]:
    average = f"average {rate(view.rate_average)}"
    return [average] if view.state == "stopped" else [f"now {rate(view.rate_now)}", average, *_lag(view)]


def _outcomes(view: PipelineView) -> list[Text]:
    shown = [(outcome, number) for outcome, number in view.outcomes.items() if number or outcome not in RARE]
    if view.failed_attempts:
        shown.append(("failed attempts", view.failed_attempts))
    return [Text(f"{name} {number:,}", BAD_STYLES.get(name, "") if number else "dim") for name, number in shown]


def _lag(view: PipelineView) -> list[str]:
    if view.lag_s is not None:
        return [f"lag {span(view.lag_s)}"]
    return [f"idle for {span(view.idle_s)}"] if view.idle_s is not None and view.idle_s > WINDOW_S else []


def _lanes(lanes: events.Waiting) -> str:
    return f"live {lanes.live:,}, bulk {lanes.bulk:,}, busy {lanes.busy:,}, held {lanes.held:,}"


def _ledger_down(event: events.LedgerDown) -> str:
    return f"down since {stamp(event.since)}, {event.mode}"


def _reindex(reindex: ReindexProgress) -> str:
    return f"reindex {reindex.generation} {reindex.stage}, {count(reindex.rows, 'row')} read here"


def _slowest(view: PipelineView) -> list[str]:
    return [
        f"{span(call.seconds)} {_key(call.key)}{f' and {call.others:,} more' if call.others else ''}"
        for call in view.slowest[:SLOW_SHOWN]
    ]


def _objects(view: PipelineView, room: int) -> list[str]:
    """Format how far the objects are that are read in parts: the largest ones, each in so many characters."""
    shown = [_object(one, room) for one in view.objects[:OBJECTS_SHOWN]]
    left = len(view.objects) - len(shown)
    return [*shown, *([f"and {left:,} more"] if left else [])]


def _object(one: ObjectProgress, room: int) -> str:
    share = min(100, one.read * 100 // one.size) if one.size else 0
    numbers = f"{share} % of {size(one.size)}, {count(one.records, 'record')}"
    return f"{numbers} {_key(one.key, max(1, min(KEY_MAX, room - len(numbers) - 1)), head=URI_HEAD)}"


def _format_notice(label: str, notice: Notice, now: float, width: int, style: str) -> Iterator[Text]:
    times = f"{notice.times:,} times, last " if notice.times > 1 else ""
    notice_text = f"{times}{duration(round(now - notice.at))} ago: {_format_event(notice.event)}"
    room = max(2, width - LABEL_WIDTH)
    words = [Text(part) for word in notice_text.split(" ") for part in chop_cells(word, room)]
    lines = _packed(words, room, " ")
    if len(lines) > NOTICE_LINES:
        lines = [*lines[: NOTICE_LINES - 1], Text(" ").join(lines[NOTICE_LINES - 1 :])]
        lines[-1].truncate(room, overflow="ellipsis")
    for text in lines:
        text.stylize(style)
    yield from _with_label(label, lines, style)


def _format_event(event: events.Event) -> str:
    match event:
        case events.Failed():
            again = f"again in {span(event.retry_s)}"
            return f"{_key(event.key)} failed, attempt {event.attempts}, {again}: {_cause(event.cause)}"
        case events.DeadLettered():
            return f"{_key(event.key) if event.key else 'a message'} became a dead letter: {_cause(event.cause)}"
        case events.TookOver():
            return f"{_key(event.key)} was taken over from a worker whose lease has expired"
        case events.ClaimLost():
            return f"the claim on {_key(event.key)} was lost; another worker may have the key"
        case events.Unavailable():
            return f"{_cause(event.what)} cannot be reached: {_cause(event.cause)}"
        case events.LedgerDown():
            return f"the ledger is down since {stamp(event.since)}, {event.mode}: {_cause(event.cause)}"
        case events.MarkedSuspect():
            return f"{count(event.keys, 'key')} had been written without the ledger, and may be suspect now"
        case events.Unrepairable():
            return "without an origin or a refetch function, keys that an outage makes suspect are not repaired"
        case events.SinkEmpty():
            return f"{format_empty(event)}; {_cause(event.advice)}"
        case events.SweepHeld():
            return format_held_sweep(event)
        case events.SwapRefused():
            return _cause(format_refused_swap(event))
        case events.Alarmed() | events.Misdirected():
            return f"{_cause(event.cause)}; {_cause(event.advice)}"
    return plain(described(event))


def _key(key: str, limit: int = KEY_MAX, *, head: int = KEY_MAX // 2) -> str:
    """Cut a key in its middle, behind so many characters: URIs of a store begin alike, and differ at their ends."""
    text = plain(key if len(key) <= 2 * KEY_MAX else key[:KEY_MAX] + key[-KEY_MAX:])
    if len(text) <= limit:
        return text
    head = head if 2 * head < limit + 2 else 0
    return f"{text[:head]}…{text[len(text) - limit + head + 1 :]}"


def _cause(cause: str) -> str:
    return _cut(plain(cause[: CAUSE_MAX + 1]), CAUSE_MAX)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _labelled(label: str, facts: Iterable[str | Text], width: int) -> Iterator[Text]:
    texts = [Text(fact) if isinstance(fact, str) else fact for fact in facts]
    yield from _with_label(label, _packed(texts, width - LABEL_WIDTH, "  "), "dim")


def _with_label(label: str, lines: Iterable[Text], style: str) -> Iterator[Text]:
    """Put the label before the first line, and indent the others."""
    for number, text in enumerate(lines):
        yield Text().append(f"{'' if number else f'  {label}':<{LABEL_WIDTH}}", style).append_text(text)


def _packed(facts: Iterable[Text], width: int, gap: str) -> list[Text]:
    """Put as many facts into a line as fit. A fact is never wrapped; one that is wider than a line is truncated."""
    lines: list[Text] = []
    for fact in facts:
        fact.truncate(max(1, width), overflow="ellipsis")
        if lines and lines[-1].cell_len + len(gap) + fact.cell_len <= width:
            lines[-1].append(gap).append_text(fact)
        else:
            # Append to an empty text: otherwise the style of the first fact would apply to the whole line.
            lines.append(Text().append_text(fact))
    return lines
