"""How long live updates wait until the store has them, with and without a run beside them."""

from collections.abc import Mapping
from math import ceil
from operator import itemgetter


class LiveWaits:
    """Compares when versions were announced with when the store accepted them, or newer ones of the same key."""

    def __init__(self) -> None:
        self.phase = ""
        """In which part of a hunt versions are announced now; those of no part are not counted."""
        self._announced: dict[str, list[tuple[int, float, str]]] = {}
        self._written: dict[str, list[tuple[float, int]]] = {}

    def announce(self, versions: Mapping[str, int], at: float) -> None:
        if self.phase:
            for key, version in versions.items():
                self._announced.setdefault(key, []).append((version, at, self.phase))

    def note(self, key: str, version: int, at: float) -> None:
        """Note a write that the store has accepted."""
        if key in self._announced:
            self._written.setdefault(key, []).append((at, version))

    def p99(self, phase: str) -> float | None:
        """The time that one of a hundred versions of a phase exceeds; None if nothing was announced in it.

        A version that the store never got has waited for ever.
        """
        waits = sorted(wait for key in self._announced for one, wait in self._waits(key) if one == phase)
        return waits[ceil(0.99 * len(waits)) - 1] if waits else None

    def _waits(self, key: str) -> list[tuple[str, float]]:
        """The phase and the wait of each announced version of a key, oldest first."""
        announced, waits = sorted(self._announced[key], key=itemgetter(0)), list[tuple[str, float]]()
        for written_at, version in sorted(self._written.get(key, [])):
            while len(waits) < len(announced) and announced[len(waits)][0] <= version:
                _, sent_at, phase = announced[len(waits)]
                # An update may be written before the transaction that announced it has returned.
                waits.append((phase, max(0.0, written_at - sent_at)))
        return waits + [(phase, float("inf")) for _, _, phase in announced[len(waits) :]]
