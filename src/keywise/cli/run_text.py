"""Formats a reindex: its facts, its progress in one line or as a bar, and why it waits."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.progress import BarColumn, ProgressColumn, TextColumn, TimeElapsedColumn

from keywise.cli.output import count, duration, plain, progress
from keywise.core.controls import ReindexRun, RunState
from keywise.core.url import redacted
from keywise.reindex.report import RunReport, ShardReport
from keywise.reindex.row_governor import Pace
from keywise.reindex.run_watch import consent_text
from keywise.reindex.shards import GONE, READ, CatchUpProgress
from keywise.reindex.swap import CALLED_OFF
from keywise.reindex.targets import letters_command

UNATTENDED = "no worker takes part in it now; start one with keywise run, or see the log of the workers"
BAR_WIDTH = 20

Facts = list[tuple[str, str]]


def run_facts(name: str, report: RunReport) -> Facts:
    """Describe a run and how far it has come."""
    run = report.run
    facts = [
        ("reindex", f"{name}, generation {run.generation}: {stage_of(report)}"),
        *_target_facts(name, report),
        *([] if run.is_rollback else _row_facts(report)),
        ("time", _time_text(report)),
    ]
    if report.pace is not None:
        facts.append(("pace", _row_pace_text(report.pace)))
    if report.postponed:
        facts.append(("postponed", f"{count(report.postponed, 'row')} did not end in time; the sweep writes them"))
    if report.swept:
        deleted = "; the deletions of gone keys count as applied" if report.swept.get(GONE) else ""
        facts.append(("sweep", outcomes(report.swept) + deleted))
    if report.dead and not run.is_rollback:
        facts.append(("dead", dead_text(name, run, report.dead)))
    if run.state is RunState.CATCHING_UP and report.catch_up.passes:
        facts += _catch_up_facts(report)
    facts += [("waiting", text) for text in waiting_texts(name, report)]
    facts += [("reading", _shard_text(one)) for one in report.working if one not in report.stalled]
    if run.notify:
        sent = "sent to" if run.is_notified else "to be sent to" if not run.is_active else "at the end, to"
        facts.append(("notice", f"{sent} {redacted(run.notify)}"))
    if run.why or run.by:
        facts.append(("started by", "; ".join(part for part in (run.by, run.why) if part)))
    return facts


def stage_of(report: RunReport) -> str:
    """Name the stage of a run, and for a run beside what happens in it."""
    run = report.run
    stage = run.state.value
    if report.is_moving:
        stage = "swapping, and changes wait"
    elif run.swaps and run.is_active:
        stage += ", to be swapped in"
    if run.is_rollback:
        stage += ", rollback"
    return f"{stage}, paused" if run.is_paused else stage


def progress_text(report: RunReport) -> str:
    """Describe in one line how far a run has come."""
    run, last = report.run, report.catch_up
    text = f"reindex {run.generation} is {stage_of(report)}"
    if not run.is_beside:
        return f"{text}: {_rows_read(report)} rows read"
    if run.state is not RunState.CATCHING_UP:
        return f"{text}: {_rows_read(report)} rows read into {run.into}, {run.live} is live"
    return f"{text}: {run.into} is {count(last.behind, 'key')} behind {run.live}, which is live"


def waiting_texts(name: str, report: RunReport) -> list[str]:
    """Say why a run does not go on by itself, and what to do; empty if it does."""
    run, last = report.run, report.catch_up
    if report.gone:
        return [consent_text(name, report)]
    if run.state is RunState.STARTING and report.is_unattended:
        into = f" --into {run.into}" if run.is_beside else ""
        some = ", and with its --ids, --where or --limit" if run.is_partial else ""
        return [f"its start was interrupted; repeat it with keywise reindex start {name}{into}{some}"]
    if report.is_unattended:
        return [UNATTENDED]
    if report.is_held:
        return [f"the pipeline is paused, and its rows wait; resume it with keywise resume --all --pipeline {name}"]
    texts = [f"{_shard_text(one)}; see the log of the workers for the cause" for one in report.stalled]
    if run.state is RunState.CATCHING_UP and last.refused and not run.swaps:
        texts.append(
            f"the swap was refused: {'; '.join(last.refused)}; when the cause is gone, run keywise reindex swap {name}"
        )
    return texts


def outcomes(counts: Mapping[str, int]) -> str:
    """Format how rows ended."""
    return ", ".join(f"{name} {number:,}" for name, number in sorted(counts.items()) if name != READ) or "-"


def dead_text(name: str, run: ReindexRun, dead: int) -> str:
    """Say how many rows were not written, and where they are."""
    where = "they went with its target" if run.is_dropped else f"see {letters_command(name, run)}"
    return f"{count(dead, 'row')} could not be read or written; {where}"


def next_step(name: str, run: ReindexRun) -> str:
    """Say what follows for a run that was started just now."""
    if not run.is_beside:
        return f"workers read the rows, see keywise reindex status {name}"
    return (
        f"workers fill {run.into}, see keywise reindex status {name}; then keywise reindex verify {name}, and keywise "
        f"reindex swap {name}"
    )


@contextmanager
def showing_run() -> Iterator[Callable[[RunReport], None]]:
    """Show in a terminal how far a run has come; report each cause of a delay once on stderr."""
    said: set[str] = set()
    with progress(*bar_columns()) as bar:
        shown = ""

        def show(report: RunReport) -> None:
            nonlocal shown
            for cause in _delays(report):
                if cause not in said:
                    print(plain(cause), file=sys.stderr)
                    said.add(cause)
            if (activity := _activity(report)) != shown:
                # Each activity has a bar with its own time, because the clock of a full bar stops.
                for old in bar.task_ids:
                    bar.remove_task(old)
                bar.add_task(activity, total=None, done="")
                shown = activity
            # How far a later stage has come is not known.
            is_read = report.run.state is not RunState.SCANNING
            done, total = (0, None) if is_read else (report.rows_read, report.rows_expected)
            for task in bar.task_ids:
                bar.update(task, done=_done(report), completed=done, total=total)

        yield show


def bar_columns() -> tuple[ProgressColumn, ...]:
    """The columns of a bar that fits into 60 columns; its field `done` says how much is done."""
    done = TextColumn("{task.fields[done]}", markup=False)
    return TextColumn("{task.description}", markup=False), BarColumn(bar_width=BAR_WIDTH), done, TimeElapsedColumn()


def _delays(report: RunReport) -> Iterator[str]:
    """Yield why a command has to wait for longer than usual."""
    if report.is_unattended:
        yield f"waiting: {UNATTENDED}"
    if report.run.swaps:
        yield from (f"{name}: {text}" for name, text in _swap_facts(report.catch_up.refused))


def _activity(report: RunReport) -> str:
    run = report.run
    if not run.is_active:
        return "ended"
    if run.is_paused:
        return "paused"
    if report.is_unattended:
        return "waiting for a worker"
    if report.is_moving:
        return "swapping"
    if run.state is RunState.CATCHING_UP:
        return "catching up"
    if run.state is RunState.SWEEPING:
        return "writing postponed rows" if run.is_beside else "looking up other keys"
    return "reading rows"


def _done(report: RunReport) -> str:
    last = report.catch_up
    if report.run.state is RunState.CATCHING_UP:
        return f"pass {last.passes:,}, {count(last.behind, 'key')} behind" if last.passes else "first pass"
    return f"{report.rows_read:,}/{'?' if report.rows_expected is None else f'{report.rows_expected:,}'}"


# Facts.


def _row_facts(report: RunReport) -> Facts:
    return [
        ("shards", _shards_text(report)),
        ("rows", f"{_rows_read(report)} read, {report.rows_per_s:,.0f}/s"),
        ("outcomes", outcomes(report.counts)),
    ]


def _target_facts(name: str, report: RunReport) -> Facts:
    """Say which target a run fills, or which one is live since the last swap."""
    run = report.run
    if run.is_beside and run.is_active:
        return [("into", run.into), ("live", run.live)]
    facts = [("live", f"{report.target}, since the last swap")] if report.target else []
    if report.spare:
        ways = f"back to it with keywise reindex rollback {name}, delete it with keywise reindex drop {name}"
        facts.append(("spare", f"{report.spare}; {ways}"))
    if run.is_beside and run.state is RunState.CANCELLED and not run.is_dropped and not run.is_rollback:
        facts.append(("left", f"{run.into}; delete it with keywise reindex drop {name}"))
    return facts


def _catch_up_facts(report: RunReport) -> Facts:
    last, run = report.catch_up, report.run
    ends = {"behind": last.behind, "lagging": last.lagging, "not written": last.unwritten}
    numbers = ", ".join(f"{name} {number:,}" for name, number in ends.items())
    passes = f"{count(last.passes, 'pass', 'passes')}, the last one in {last.seconds:.1f} s"
    facts = [("catch-up", f"{passes}: {count(last.keys, 'key')}, {numbers}")]
    if not last.shrinks and last.interval_s:
        facts.append(("pace", _pace_text(last)))
    facts += [("not written", f"{key!r}: {cause}") for key, cause in last.failed.items()]
    if run.swaps:
        facts += _swap_facts(last.refused) or [("swap", "a worker begins it")]
    return facts


def _swap_facts(refused: Sequence[str]) -> Facts:
    """Say why a requested swap has not happened yet: it was tried and called off, or lines of the gate do not hold."""
    return [("tried again" if text.startswith(CALLED_OFF) else "waiting for the gate", text) for text in refused]


def _pace_text(last: CatchUpProgress) -> str:
    return (
        f"the passes do not get shorter: live changes reach {last.live_per_s:,.0f} keys/s, and a pass writes "
        f"{last.written_per_s:,.0f} keys/s"
    )


def _row_pace_text(pace: Pace) -> str:
    base = "not known" if pace.base_s is None else f"{pace.base_s * 1000:,.0f} ms"
    return (
        f"rows give way to live changes, and go at {pace.share:.0%} of full speed: live p99 {pace.live_s * 1000:,.0f} "
        f"ms, without rows {base}"
    )


def _rows_read(report: RunReport) -> str:
    is_guess = report.rows_expected is not None and report.run.state is RunState.SCANNING
    of = f" of about {report.rows_expected:,}" if is_guess else ""
    return f"{report.rows_read:,}{of}"


def _time_text(report: RunReport) -> str:
    left = f", about {duration(round(report.left_s))} left" if report.left_s is not None else ""
    return f"{duration(report.seconds)}{left}"


def _shards_text(report: RunReport) -> str:
    begun = f", {report.shards_begun:,} begun" if report.shards_begun else ""
    return f"{report.shards_read:,} of {report.run.shards:,} read{begun}"


def _shard_text(one: ShardReport) -> str:
    by = f"read by {one.owner}" if one.owner else "no worker reads it now"
    failed = f", {count(one.attempts, 'attempt')} failed in a row" if one.attempts else ""
    rows = f", {count(one.rows, 'row')}" if one.rows else ""
    return f"{one.name}{rows}, {by}, moved {duration(round(one.quiet_s))} ago{failed}"
