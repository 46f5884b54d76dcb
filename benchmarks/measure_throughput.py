"""Changes per second of keywise beside the raw loop: turn by turn, each in a fresh process, the median of all turns."""

import statistics

import msgspec

from benchmarks.drain import Drained, Job
from benchmarks.figure import Figure, Scale
from benchmarks.machine import Bystander, run_module

TARGETS = {"uniform": 0.87, "zipf": 0.85}


def measure(scale: Scale) -> list[Figure]:
    """The ratio for even keys and for zipf keys."""
    return [figure for distribution in TARGETS for figure in _ratio(scale, distribution)]


def _ratio(scale: Scale, distribution: str) -> list[Figure]:
    job = Job(scale.changes, scale.keys, scale.batch, distribution)
    turns: dict[str, list[Drained]] = {"raw": [], "keywise": []}
    with Bystander() as bystander:
        for _ in range(scale.rounds):
            for what, drained in turns.items():
                drained.append(msgspec.convert(run_module("benchmarks.drain", [what, *job.arguments()]), Drained))
    raw, keywise = (statistics.median(one.changes_per_s for one in drained) for drained in turns.values())
    raw_cpu, keywise_cpu = (statistics.median(one.cpu_us_per_change for one in drained) for drained in turns.values())
    paired = [k.changes_per_s / r.changes_per_s for r, k in zip(turns["raw"], turns["keywise"], strict=True)]
    spread = f"turn by turn {min(paired):.2f} to {max(paired):.2f}"
    busy = f"others used {bystander.others:.0%} of the CPUs"
    return [
        Figure(f"raw loop, {distribution}", raw, "changes/s", f"{raw_cpu:.1f} µs of CPU a change"),
        Figure(f"keywise, {distribution}", keywise, "changes/s", f"{keywise_cpu:.1f} µs of CPU a change"),
        Figure(
            f"keywise / raw, {distribution}",
            keywise / raw,
            "",
            f"medians of {scale.rounds}, {spread}; {busy}",
            at_least=TARGETS[distribution],
            detail={"job": job, "turns": turns, "others": bystander.others},
        ),
    ]
