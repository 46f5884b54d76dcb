"""The commands of `keywise reindex` on targets beside the live one: verify, swap, roll back, drop, and all at once."""

from dataclasses import dataclass
from typing import Annotated, NoReturn

import msgspec
import typer

from keywise.cli.admin_options import YesOption, audit_note, confirm
from keywise.cli.commands.reindex import (
    MOMENTS,
    ActOptions,
    DeleteOption,
    MappingOption,
    NotifyOption,
    PipelineArgument,
    perform_on,
    print_step,
    read_definition,
    reindex_admin,
    require_text,
)
from keywise.cli.options import grouped, parse_duration
from keywise.cli.output import count, duration, fail, plain, print_error, print_json, print_line, print_table, refuse
from keywise.cli.run_text import dead_text, showing_run
from keywise.core.controls import PAUSE_MAX_S, SAMPLE_KEYS, ReindexRun
from keywise.operate.admin import PipelineAdmin
from keywise.reindex.admin import require_origin
from keywise.reindex.full_run import FullPlan, FullResult, FullRun
from keywise.reindex.gate import GateLine, GateResult
from keywise.reindex.plan import RunPlan
from keywise.reindex.report import RunReport
from keywise.reindex.run_watch import RunWatch, refusal_of
from keywise.reindex.targets import GENERATION

ALL_KEYS = 2**62
"""The sample that `--sample all` stands for: no pipeline has more keys."""
PauseMaxOption = Annotated[
    str | None,
    typer.Option("--pause-max", metavar="DURATION", help=f"How long changes may wait; else {PAUSE_MAX_S:g}s."),
]
AcceptDeadOption = Annotated[
    int, typer.Option("--accept-dead", metavar="N", min=0, help="Swap even if up to N rows are missing.")
]
SampleOption = Annotated[
    str | None,
    typer.Option("--sample", metavar="N", help=f"Compare N keys with the origin, or all; else {SAMPLE_KEYS}."),
]
NoWaitOption = Annotated[bool, typer.Option("--no-wait", help="Do not wait until the swap is decided.")]


@dataclass(frozen=True, kw_only=True)
class SwapOptions:
    """Within which limits a swap may happen."""

    accept_dead: AcceptDeadOption = 0
    pause_max: PauseMaxOption = None
    sample: SampleOption = None


@grouped
def verify(
    pipeline: PipelineArgument,
    *,
    sample: SampleOption = None,
    options: ActOptions,
) -> None:
    """Check line by line what must hold before a swap.

    These lines are the gate. Exits with status 1 if one of them does not hold, and says what to do.

    \b
    Example:
      keywise reindex verify search --app shop:app
      keywise reindex verify search --sample all --app shop:app
    """
    keys = _sample_keys(sample)
    name, gate = perform_on(pipeline, options, lambda admin: reindex_admin(admin, options).verify(keys))
    if options.json:
        _print_gate_json(name, gate)
    else:
        _print_gate(name, gate, sample)
    if not gate.is_open:
        raise typer.Exit(1)


@grouped
def swap(
    pipeline: PipelineArgument,
    *,
    limits: SwapOptions,
    no_wait: NoWaitOption = False,
    yes: YesOption = False,
    options: ActOptions,
) -> None:
    """Let the new target become the live one.

    A worker does it as soon as the gate allows it: it lets changes wait for some seconds, makes both targets equal, and
    moves the name. If a line of the gate needs you, nothing is done, and the exit status is 1. Ctrl-C ends the wait of
    the command, but not the swap.

    \b
    Example:
      keywise reindex swap search --yes --app shop:app
      keywise reindex swap search --yes --sample all --app shop:app
      keywise reindex swap search --accept-dead 3 --pause-max 10s --why 'ticket 7' --app shop:app
    """
    dead, pause_s, keys = limits.accept_dead, _pause_s(limits.pause_max), _sample_keys(limits.sample)

    async def act(admin: PipelineAdmin) -> tuple[RunReport | GateResult | None, str]:
        reindex = reindex_admin(admin, options)
        gate = await reindex.verify(keys, accept_dead=dead, pause_max_s=pause_s)
        if gate.is_refused:
            return gate, ""
        run = gate.run
        confirm(
            f"Let {run.into} of {admin.pipeline.name} go live in place of {run.live}? Changes wait for up to "
            f"{duration(run.pause_max_s)}.",
            yes=yes,
        )
        run = await reindex.swap(dead, pause_s, keys)
        return (None, "") if no_wait else await _until_decided(admin, run)

    name, (found, swapped) = perform_on(pipeline, options, act)
    if isinstance(found, GateResult):
        _refuse_by_gate(name, found, json=options.json)
    _print_swap(name, found, swapped, json=options.json)


@grouped
def rollback(
    pipeline: PipelineArgument,
    *,
    pause_max: PauseMaxOption = None,
    sample: SampleOption = None,
    no_wait: NoWaitOption = False,
    yes: YesOption = False,
    options: ActOptions,
) -> None:
    """Go back to the target that was live before.

    What was written since the swap is copied to it first, so nothing is lost.

    \b
    Example:
      keywise reindex rollback search --why 'the new mapping finds nothing' --app shop:app
    """
    pause_s, keys = _pause_s(pause_max), _sample_keys(sample)

    async def act(admin: PipelineAdmin) -> tuple[RunReport | None, str]:
        reindex = reindex_admin(admin, options)
        controls = await reindex.controls_with_spare()
        confirm(
            f"Let {controls.spare} of {admin.pipeline.name} go live again, in place of {controls.target}?",
            yes=yes,
        )
        run = await reindex.rollback(pause_s, keys)
        return (None, "") if no_wait else await _until_decided(admin, run)

    name, (found, swapped) = perform_on(pipeline, options, act)
    _print_swap(name, found, swapped, json=options.json)


@grouped
def drop(
    pipeline: PipelineArgument,
    *,
    keep_target: Annotated[
        bool, typer.Option("--keep-target", help="Forget the target, and leave it in its store.")
    ] = False,
    yes: YesOption = False,
    options: ActOptions,
) -> None:
    """Delete the target that was live before the last swap, or that a cancelled run has left.

    Then there is no way back to it.

    \b
    Example:
      keywise reindex drop search --yes --app shop:app
      keywise reindex drop search --keep-target --app shop:app
    """

    async def act(admin: PipelineAdmin) -> str:
        reindex = reindex_admin(admin, options)
        target, _ = await reindex.target_to_drop()
        confirm(f"{'Forget' if keep_target else 'Delete'} {target}? There is no way back to it then.", yes=yes)
        return await reindex.drop(keeps_always=keep_target)

    name, target = perform_on(pipeline, options, act)
    if options.json:
        print_json({"pipeline": name, "dropped": target, "is_kept": keep_target})
    else:
        print(plain(f"{'forgot' if keep_target else 'deleted'} {target} of {name}"))


@dataclass(frozen=True, kw_only=True)
class FullOptions:
    """What `run` does, and within which limits."""

    into: Annotated[
        str | None,
        typer.Option("--into", metavar="NAME", help="Fill this target, and swap it in; {generation} has to be in it."),
    ] = None
    mapping: MappingOption = None
    if_older_than: Annotated[
        str | None,
        typer.Option("--if-older-than", metavar="DURATION", help="Do nothing if one ended more recently, as in 7d."),
    ] = None
    keep: Annotated[
        int | None,
        typer.Option("--keep", metavar="N", min=1, help="How many former live targets stay; else 1, the spare."),
    ] = None
    accept_dead: AcceptDeadOption = 0
    pause_max: PauseMaxOption = None
    sample: SampleOption = None
    delete_max: DeleteOption = None
    notify: NotifyOption = ""

    def plan(self) -> FullPlan:
        """Return the plan; exit with status 2 if options do not fit together."""
        require_text({"--into": self.into})
        if self.into and GENERATION not in self.into:
            refuse(f"--into {self.into}: each run fills a target of its own, so write {GENERATION} into its name")
        only_into = {"--mapping": self.mapping, "--keep": self.keep, "--pause-max": self.pause_max}
        only_into |= {"--accept-dead": self.accept_dead or None, "--sample": self.sample}
        for option, value in only_into.items():
            if value is not None and not self.into:
                refuse(f"{option} is for a target beside the live one; name it with --into 'NAME_{GENERATION}'")
        older = self.if_older_than
        return FullPlan(
            run=RunPlan(
                into=self.into or "",
                definition=read_definition(self.mapping),
                delete_max=self.delete_max,
                notify=self.notify,
            ),
            if_older_than_s=None if older is None else parse_duration(older, "--if-older-than"),
            keep=self.keep or 1,
            accept_dead=self.accept_dead,
            pause_max_s=_pause_s(self.pause_max),
            sample_keys=_sample_keys(self.sample),
        )


@grouped
def run_fully(pipeline: PipelineArgument, *, chosen: FullOptions, options: ActOptions) -> None:
    """Rebuild and swap in one command, for cron.

    It starts a run into a new target, waits for it, verifies it, swaps it in, and deletes old targets. Without --into
    it is a run in place that waits. Repeat the command after a crash: it goes on with the run that it finds. The exit
    status is 0 if it is done, or not due yet, and 1 if it was refused, cancelled, or needs you.

    \b
    Example:
      keywise reindex run search --into 'pages-{generation}' --if-older-than 7d --keep 2 --app shop:app
      keywise reindex run search --delete-max 100 --app shop:app
    """
    plan = chosen.plan()

    async def act(admin: PipelineAdmin) -> FullResult:
        with showing_run() as show:
            return await FullRun(admin, audit_note(options.who, options.why), plan, show, print_step).run()

    name, result = perform_on(pipeline, options, act)
    if options.json:
        print_json({"pipeline": name, **msgspec.to_builtins(result)}, moments=MOMENTS)
    else:
        for line in _result_lines(name, result):
            print(plain(line))


async def _until_decided(admin: PipelineAdmin, run: ReindexRun) -> tuple[RunReport, str]:
    """Wait until a worker has swapped, or the swap was refused; return the report, and the record of the swap."""
    _, shards = require_origin(admin.pipeline)
    with showing_run() as show:
        watch = RunWatch(admin.pipeline, shards, run, show)
        report = await watch.until_decided()
        return report, "" if refusal_of(admin.pipeline.name, report) else await watch.swap_record()


def _print_swap(name: str, report: RunReport | None, swapped: str, *, json: bool) -> None:
    """Print that a target is live; or why it is not, and exit with status 1; or, without a report, where to look."""
    if report is None:
        if json:
            print_json({"pipeline": name, "is_live": None})
        else:
            print(plain(f"a worker swaps as soon as it can; see keywise reindex status {name}"))
        return
    refusal = refusal_of(name, report)
    if json:
        print_json(
            {
                "pipeline": name,
                "is_live": not refusal,
                **msgspec.to_builtins(report.run),
                "target": report.target,
                "spare": report.spare,
                "refused": report.catch_up.refused if refusal else [],
                "swapped": swapped,
            },
            moments=MOMENTS,
        )
    if refusal:
        fail(refusal)
    if not json:
        print(plain(_live_line(name, report.target, report.spare, swapped)))


def _live_line(name: str, target: str, spare: str, swapped: str) -> str:
    _, _, waited = swapped.partition("; ")
    back = f"; back to {spare} with keywise reindex rollback {name}" if spare else ""
    return f"{target} is live{f'; {waited}' if waited else ''}{back}"


def _result_lines(name: str, result: FullResult) -> list[str]:
    run = result.run
    assert run is not None, "a run is complete"
    if not result.is_due:
        lines = [f"not due yet: reindex {run.generation} of {name} ended {duration(result.ended_s_ago)} ago"]
    else:
        lines = [f"reindex {run.generation} of {name} is complete"]
        if run.is_beside:
            lines.append(_live_line(name, result.target, result.spare, result.swapped))
        if result.dead:
            lines.append(dead_text(name, run, result.dead))
    return lines + [f"deleted {target}" for target in result.dropped]


# The gate.


def _print_gate(name: str, gate: GateResult, sample: str | None = None) -> None:
    run = gate.run
    print_line(f"{run.into} of {name}, generation {run.generation}, beside {run.live}")
    print_table(
        ("line", "holds", "value"), [(line.name, _holds(line), line.value) for line in gate.lines], fold=("value",)
    )
    for line in gate.failing:
        print_line(f"{line.name}: {line.advice or 'it may hold after another pass'}")
    if gate.is_open:
        print_line(f"the swap may begin: keywise reindex swap {name}{f' --sample {sample}' if sample else ''}")
    else:
        do = "does" if len(gate.failing) == 1 else "do"
        print_error(f"{len(gate.failing)} of {count(len(gate.lines), 'line')} {do} not hold, so {run.live} stays live")


def _print_gate_json(name: str, gate: GateResult) -> None:
    run = gate.run
    facts = {"pipeline": name, "generation": run.generation, "into": run.into, "live": run.live}
    print_json({**facts, "is_open": gate.is_open, "lines": msgspec.to_builtins(gate.lines)})


def _refuse_by_gate(name: str, gate: GateResult, *, json: bool) -> NoReturn:
    if json:
        _print_gate_json(name, gate)
    else:
        _print_gate(name, gate)
    raise typer.Exit(1)


def _holds(line: GateLine) -> str:
    return "yes" if line.is_ok else "not yet" if line.is_transient else "no"


def _sample_keys(text: str | None) -> int:
    if text is None:
        return SAMPLE_KEYS
    if text == "all":
        return ALL_KEYS
    if not text.isdecimal() or not int(text):
        refuse(f"--sample {text}: write how many keys, at least 1, or all")
    return int(text)


def _pause_s(text: str | None) -> float:
    """Return for how long changes may wait: an earlier swap, which may have been allowed more, does not count."""
    pause_s = PAUSE_MAX_S if text is None else parse_duration(text, "--pause-max")
    if pause_s == 0:
        refuse("--pause-max 0s allows no swap, because changes wait while the name moves; give them a second or more")
    return pause_s
