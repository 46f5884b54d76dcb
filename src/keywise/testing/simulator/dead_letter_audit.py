"""Watches the dead letters of a simulated run: each has a reason, and none goes without a trace."""

from collections import Counter
from typing import TYPE_CHECKING

from keywise.core.change import Order, order_of
from keywise.core.dead_letter import DeadLetter

if TYPE_CHECKING:
    from keywise.testing.simulator.auditor import Auditor
    from keywise.testing.simulator.workload import Sent
    from keywise.testing.simulator.world import World


class Letters:
    """The auditor's part that looks at dead letters."""

    def __init__(self, world: "World", auditor: "Auditor") -> None:
        self._world = world
        self._auditor = auditor
        self.dead: set[tuple[str, Order]] = set()
        """Changes that were set aside and not sent again since."""
        self.buried: set[bytes] = set()
        """Their bodies, and those of malformed messages."""
        self.count_of: Counter[bytes] = Counter()
        self._bodies: dict[int, bytes] = {}
        self.revived: Counter[bytes] = Counter()
        """How often a letter with this body was sent again."""
        self._gone: Counter[bytes] = Counter()

    def sent_again(self, sent: "Sent") -> None:
        """What was set aside is in the queue again."""
        self.revived[sent.body] += 1
        self.buried.discard(sent.body)
        self.dead.discard((sent.key, sent.order))

    def look(self) -> None:
        """Compare with what was seen last."""
        for number in self._bodies.keys() - self._world.letters().keys():
            body = self._bodies.pop(number)
            self._gone[body] += 1
            if self._gone[body] > self.revived[body]:
                self._auditor.violate(f"dead letter {number} is gone, and was not sent again")
        for number, (_, letter) in self._world.letters().items():
            if number not in self._bodies:
                self._bodies[number] = letter.body
                self._found(letter)

    def _found(self, letter: DeadLetter) -> None:
        self.buried.add(letter.body)
        self.count_of[letter.body] += 1
        copies = sum(body == letter.body for body in self._world.bodies.values())
        if self._world.is_queue_transaction and self.count_of[letter.body] > copies:
            self._auditor.violate(f"{letter.key or 'a malformed message'} {letter.version} is buried twice")
        self._auditor.note(f"dead letter {letter.key} {letter.version}: {letter.cause}")
        if letter.key:
            order = order_of(letter.version)
            self.dead.add((letter.key, order))
            self._world.final_checks.check_death(letter.key, order, letter.cause)
