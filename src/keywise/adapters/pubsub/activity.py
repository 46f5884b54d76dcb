"""What a process knows of a subscription: Pub/Sub does not count messages, so what is held and away is noted here."""

from collections import OrderedDict
from collections.abc import Iterable

from keywise.core.change import Delivery

COUNTED_MAX = 10_000
"""Of how many messages it is noted how often they were given back."""


class SubscriptionActivity:
    """Shared by the sources of one subscription in an app. All times are readings of the event loop's clock."""

    def __init__(self, subscription: str) -> None:
        self.subscription = subscription
        self.stirred_at: float | None = None
        """When a message last came, or a call last failed; None if no source was open yet."""
        self._held: dict[str | int, float] = {}
        """Until when messages are hidden that this process holds."""
        self._away_until = 0.0
        self._returned: OrderedDict[str | int, int] = OrderedDict()
        """The count of messages that were given back, as of their last delivery."""

    def stir(self, now: float) -> None:
        self.stirred_at = now

    def hold(self, deliveries: Iterable[Delivery], until: float) -> None:
        for one in deliveries:
            self._held[one.id] = until

    def extend(self, deliveries: Iterable[Delivery], until: float) -> None:
        for one in deliveries:
            if one.id in self._held:
                self._held[one.id] = until

    def drop(self, deliveries: Iterable[Delivery]) -> None:
        for one in deliveries:
            self._held.pop(one.id, None)
            self._returned.pop(one.id, None)

    def put_off(self, deliveries: Iterable[Delivery], until: float) -> None:
        """Note that messages were given back, and how often they have come so far."""
        for one in deliveries:
            self._held.pop(one.id, None)
            self._returned.pop(one.id, None)
            self._returned[one.id] = one.count
            if len(self._returned) > COUNTED_MAX:
                self._returned.popitem(last=False)
        self.await_until(until)

    def await_until(self, until: float) -> None:
        self._away_until = max(self._away_until, until)

    def count_of(self, message_id: str) -> int:
        """How often a message was delivered, as far as this process knows: including now."""
        return self._returned.get(message_id, 0) + 1

    def held(self, now: float) -> int:
        """How many messages this process holds; those that it has lost are forgotten."""
        for id in [id for id, until in self._held.items() if until <= now]:
            del self._held[id]
        return len(self._held)

    def away_s(self, now: float) -> float:
        """For how long messages may be away that this process has put off."""
        return max(0.0, self._away_until - now)
