"""Care requests and the visits that answer them: which key a request has, and whether a car is free for it."""

import math
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Annotated

import msgspec

from keywise.core.errors import RefusedError

CARS = {"Denver": 3, "Phoenix": 2, "Tampa": 1}
"""How many cars each market has; a car is at one visit at a time."""
OPENS, CLOSES = 8 * 60, 18 * 60
"""When the cars are on the road, in minutes of the day."""

LocalTime = Annotated[datetime, msgspec.Meta(tz=False)]
"""As the clocks of the market show it."""


class CareRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Somebody wants to be visited inside of a window."""

    id: Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[\w.:-]+\Z")]
    """Made by whoever asks, and the same when the question is repeated."""
    market: str
    earliest: LocalTime
    latest: LocalTime
    minutes: Annotated[int, msgspec.Meta(ge=10, le=240)] = 45

    @property
    def day(self) -> str:
        return self.earliest.date().isoformat()


class Visit(msgspec.Struct, frozen=True):
    """A car at a patient's, from one minute of a day to another."""

    id: str
    market: str
    day: str
    car: int
    starts: int
    ends: int


class Decision(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to a care request: a car and a time, or the reason why not."""

    accepted: bool
    car: int = 0
    starts: str = ""
    reason: str = ""


def market_and_day(request: CareRequest) -> tuple[str, str]:
    """The key: requests of one market and day are judged one after another."""
    if request.market not in CARS:
        raise RefusedError(f"there is no market {request.market!r}; take one of {', '.join(CARS)}")
    if request.earliest.date() != request.latest.date():
        # It would be judged against one schedule, and booked into another.
        raise RefusedError(
            f"the window from {request.earliest:%Y-%m-%d %H:%M} to {request.latest:%Y-%m-%d %H:%M} spans two dates; "
            "ask for one date, and if that is refused, for the other"
        )
    if (request.latest - request.earliest).total_seconds() < request.minutes * 60:
        raise RefusedError(
            f"the window has no room for {request.minutes} minutes, whoever else comes; ask for a longer one"
        )
    return request.market, request.day


def place_for(request: CareRequest, visits: Sequence[Visit]) -> Visit | None:
    """The first time in its window when a car is free for it, beside all visits of that market and day."""
    return _place_in((math.ceil(_minute(request.earliest)), math.floor(_minute(request.latest))), request, visits)


def refusal(request: CareRequest, visits: Sequence[Visit]) -> str:
    """Why there is no place for a request, and what to ask for in its stead."""
    if _place_in((OPENS, CLOSES), request, visits) is None:
        return f"{request.market} is fully booked on {request.day}; ask for another day, or for another market"
    return (
        f"{request.market} has no car for {request.minutes} minutes between {request.earliest:%H:%M} and "
        f"{request.latest:%H:%M} on {request.day}; ask for another window of that day"
    )


def clashes(visits: Iterable[Visit]) -> list[Visit]:
    """Visits that begin while their car is at another one."""
    found = []
    busy_until: dict[tuple[str, str, int], int] = {}
    for visit in sorted(visits, key=lambda visit: (visit.starts, visit.ends)):
        car = (visit.market, visit.day, visit.car)
        if busy_until.get(car, 0) > visit.starts:
            found.append(visit)
        busy_until[car] = max(busy_until.get(car, 0), visit.ends)
    return found


def clock_of(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"


def _minute(time: datetime) -> float:
    return time.hour * 60 + time.minute + time.second / 60


def _place_in(window: tuple[int, int], request: CareRequest, visits: Sequence[Visit]) -> Visit | None:
    places = []
    for car in range(1, CARS[request.market] + 1):
        taken = [visit for visit in visits if visit.car == car]
        starts = _free_from(max(window[0], OPENS), request.minutes, taken)
        if starts + request.minutes <= min(window[1], CLOSES):
            places.append((starts, car))
    if not places:
        return None
    starts, car = min(places)
    return Visit(request.id, request.market, request.day, car, starts, starts + request.minutes)


def _free_from(starts: int, minutes: int, taken: Iterable[Visit]) -> int:
    """From when on a car has that many minutes between its visits."""
    for visit in sorted(taken, key=lambda visit: visit.starts):
        if visit.starts < starts + minutes and visit.ends > starts:
            starts = visit.ends
    return starts
