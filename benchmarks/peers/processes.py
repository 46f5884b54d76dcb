"""What processes cost: CPU time and memory, read from /proc by session."""

import os
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(sessions: set[int]) -> float:
    """CPU seconds of all processes of some sessions, and of their children that ended."""
    return sum(sum(map(int, words[11:15])) for _, words in _stats() if int(words[3]) in sessions) / float(TICKS)


def peak_bytes(sessions: set[int]) -> int:
    """The most memory that each process ever had, summed up."""
    return sum(_peak(pid) for pid, words in _stats() if int(words[3]) in sessions)


def family_cpu_s(pid: int) -> float:
    """CPU seconds of a process, its children, and those of its children that ended."""
    total = 0.0
    for number, words in _stats():
        if number == pid:
            total += sum(map(int, words[11:15]))
        elif int(words[1]) == pid:
            total += sum(map(int, words[11:13]))
    return total / float(TICKS)


def parent_of(pid: int) -> int:
    return next(int(words[1]) for number, words in _stats() if number == pid)


def _stats() -> list[tuple[int, list[str]]]:
    """The number of each process, and the words after its name: state, parent, group, session, …"""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            found.append((int(path.parent.name), path.read_text().rpartition(")")[2].split()))
        except OSError:
            continue  # It ended meanwhile.
    return found


def _peak(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
