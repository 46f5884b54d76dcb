"""Kills, stops and cuts off holders of the merge queue in the middle of a call, and judges what callers were told."""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos.serial_diary import Diary
from chaos.serial_postgres import BACKENDS, Site, on_postgres
from chaos.serial_tables import book_of, judged
from keywise import adapters
from keywise.core.clock import boot_time
from keywise.core.serial.contract import Ending, TurnPolicy
from keywise.core.url import Address
from running import scaled
from servers.redis import redis_server

ON = ["sqlite", "redis", *BACKENDS]
ATOMIC = ["sqlite", *BACKENDS]
"""Where functions can write in the store's own transaction."""
LEASE_S = 1.5
TIMEOUT_S = 8.0
SLACK_S = 1.5
"""A busy machine may be late with an answer by so much."""
FRESH_S = 0.5
"""What began longer ago and has no end was broken off."""
WORKERS = 3
SETTINGS = {"lease": LEASE_S, "margin": 0.3, "poll": 0.1}


@dataclass
class Tally:
    """What was done, what callers were told, and what is wrong."""

    kills: int = 0
    stops: int = 0
    cuts: int = 0
    """Sessions with the server that were ended."""
    begun: int = 0
    told: Counter = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


class Fleet:
    """Processes with callers, and the moments at which they were stopped."""

    def __init__(self, folder: Path, url: str, **options) -> None:
        self.url = url
        self.folder = folder
        self.diary = Diary(folder / "diary.db")
        self.options = {"url": url, "diary": str(folder / "diary.db"), "settings": SETTINGS, "work_s": 0.03}
        self.options |= {"capacity": 10_000, "callers": 6, "calls": 1_000_000, "keys": 4, "timeout_s": TIMEOUT_S}
        self.options |= {"shared": 0, "name": "c", "is_atomic": False} | options
        self.processes: list[subprocess.Popen] = []
        self.fallen: set[int] = set()
        self.stopped: list[tuple[int, float, float]] = []

    def start(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("serial_worker.py")), json.dumps(self.options)]
        self.processes.append(subprocess.Popen(command, cwd=self.folder))

    def holder(self) -> subprocess.Popen:
        """One that is in the middle of a call."""
        found: list[subprocess.Popen] = []

        def look() -> bool:
            open_pids = {pid for (pid,) in self.diary.open_since(boot_time() - FRESH_S)}
            found.extend(one for one in self.processes if one.pid in open_pids and one.poll() is None)
            return bool(found)

        until(look, "somebody to be in the middle of a call")
        return found[0]

    def kill(self) -> None:
        process = self.holder()
        process.kill()
        process.wait()
        self.fallen.add(process.pid)
        self.processes.remove(process)
        self.start()

    def stop_past_the_lease(self) -> None:
        process, began = self.holder(), boot_time()
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: boot_time() > began + LEASE_S * 1.5, "the lease to be over")
        os.kill(process.pid, signal.SIGCONT)
        self.stopped.append((process.pid, began, boot_time()))

    def end(self) -> None:
        for process in self.processes:
            # One that was started just now may not listen to signals yet.
            until(lambda process=process: self._listens(process), "a process to have an answer")
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                assert process.wait(scaled(60)) == 0, f"a process ended with {process.returncode}"
            finally:
                process.kill()

    def _listens(self, process: subprocess.Popen) -> bool:
        return process.poll() is not None or bool(
            self.diary.rows(f"select 1 from told where pid = {process.pid:d} limit 1")
        )


def hunt(folder: Path, url: str, times: int, site: Site | None = None, *, is_atomic: bool = False) -> Tally:
    """So many kills, stops and, at a site with a server, cuts, then a judgement."""
    settings = SETTINGS | (site.settings if site is not None else {})
    fleet, tally = Fleet(folder, url, settings=settings, is_atomic=is_atomic), Tally()
    if is_atomic:
        os.chdir(folder)
        book_of(url).create()
    for _ in range(WORKERS):
        fleet.start()
    try:
        for _ in range(times):
            fleet.kill()
            tally.kills += 1
            fleet.stop_past_the_lease()
            tally.stops += 1
            if site is not None:
                fleet.holder()
                tally.cuts += site.cut(is_atomic)
        done = len(fleet.diary.rows("select 1 from told where outcome = 'done'"))
        until(lambda: len(fleet.diary.rows("select 1 from told where outcome = 'done'")) > done + 20, "it to go on")
    finally:
        fleet.end()
    judge(fleet, tally)
    if is_atomic:
        tally.faults += judged(book_of(url), fleet.diary.rows("select id, outcome from told"))
    if site is not None:
        tally.faults += site.leftovers()
    return tally


def judge(fleet: Fleet, tally: Tally) -> None:
    diary = fleet.diary
    tally.begun = len(diary.rows("select 1 from begun"))
    tally.told = Counter(outcome for (outcome,) in diary.rows("select outcome from told"))
    if not fleet.options["is_atomic"]:
        # In a transaction, what was broken off has not happened, and is run again.
        tally.faults += [f"{id} was run {n} times" for id, n in diary.rows(_TWICE_BEGUN)]
        tally.faults += [f"{id} was accepted {n} times" for id, n in diary.rows(_TWICE_ACCEPTED)]
        tally.faults += [f"{one} and {other} ran side by side on {key}" for one, other, key in _overlaps(fleet)]
    for id, pid, outcome, at, deadline in diary.rows("select id, pid, outcome, at, deadline from told"):
        was_stopped = any(pid == other and begin < deadline and end > at - 60 for other, begin, end in fleet.stopped)
        if at > deadline + SLACK_S and not was_stopped:
            tally.faults.append(f"the caller of {id} was told {outcome} {at - deadline:.1f} s too late")
    asyncio.run(_compare(fleet, tally))


def _overlaps(fleet: Fleet) -> list[tuple[str, str, str]]:
    """Calls of one key whose times overlap, though none of them was in a process that was stopped or killed."""
    found, last = [], dict[str, tuple[str, float]]()
    halted = {pid for pid, _, _ in fleet.stopped} | fleet.fallen
    for id, key, pid, begin, end in fleet.diary.rows("select id, key, pid, at, ended from begun order by at"):
        if pid in halted or end is None:
            continue
        before = last.get(key)
        if before is not None and begin < before[1]:
            found.append((before[0], id, key))
        last[key] = (id, end)
    return found


async def _compare(fleet: Fleet, tally: Tally) -> None:
    """Every answer is the stored one."""
    os.chdir(fleet.folder)
    turns = adapters.connect_turns(Address(fleet.url, "accept", {}), "judge", TurnPolicy())
    async with turns:
        told = fleet.diary.rows("select id, answer from told where outcome = 'done'")
        replies = await turns.replies(sorted({id for id, _ in told}))
    for id, answer in told:
        reply = replies.get(id)
        if reply is None or reply.outcome is not Ending.DONE or json.loads(reply.body) != json.loads(answer):
            tally.faults.append(f"the caller of {id} was told {answer}, and {reply} is stored")


def until(condition, what: str, limit_s: float = 60.0) -> None:
    deadline, pause = boot_time() + scaled(limit_s), threading.Event()
    while not condition():
        if boot_time() > deadline:
            raise TimeoutError(f"waited {limit_s:g} s for {what}")
        pause.wait(0.005)


_TWICE_BEGUN = "select id, count(distinct token) as n from begun group by id having n > 1"
_TWICE_ACCEPTED = "select id, count(*) as n from accepted group by id having n > 1"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    times = "kills, as many stops past the lease, and as many times that sessions are cut off"
    parser.add_argument("--times", type=int, default=100, help=times)
    parser.add_argument("--on", action="append", choices=ON, help="only there; may be given often")
    options = parser.parse_args()
    runs = [(on, is_atomic) for on in options.on or ON for is_atomic in (False, True) if on in ATOMIC or not is_atomic]
    faults = [_run(on, options.times, is_atomic) for on, is_atomic in runs]
    return 1 if any(faults) else 0


@contextmanager
def _site(on: str) -> Iterator[tuple[str, Site | None]]:
    if on == "sqlite":
        yield "sqlite:///merge.db", None
    elif on == "redis":
        with redis_server() as server:
            yield server.url, None
    else:
        with on_postgres(on) as site:
            yield site.url, site


def _run(on: str, times: int, is_atomic: bool) -> int:
    """How many faults there were."""
    with tempfile.TemporaryDirectory() as folder, _site(on) as (url, site):
        tally = hunt(Path(folder), url, times, site, is_atomic=is_atomic)
    sys.stdout.write(
        f"{on}{' in its transaction' if is_atomic else ''}: {tally.kills} kills, {tally.stops} stops and "
        f"{tally.cuts} lost sessions in the middle of a call, "
        f"{tally.begun} calls begun, told: {dict(tally.told)}, faults: {len(tally.faults)}\n"
    )
    sys.stdout.flush()
    for fault in tally.faults[:20]:
        sys.stdout.write(f"{fault}\n")
    return len(tally.faults)


if __name__ == "__main__":
    sys.exit(main())
