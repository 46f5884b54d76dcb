"""A repair that fails is no death: whoever looks at the truth next may repair."""

from flow.rig import Running
from flow.test_repair import NEXT_LOOK_S, Ward
from keywise.core import events


def test_failed_looks_at_the_truth_are_not_counted_as_deaths_of_workers():
    """Suspect and repair: an origin that is away for a while must not make every worker give up for ever."""
    is_away = [True]

    def refetch(key):
        if is_away[0]:
            raise ConnectionError("origin away")
        return {"id": key, "v": 5}

    ward = Ward(refetch)

    async def story() -> None:
        await ward.fall_ill()
        async with Running(ward, "w1"), Running(ward, "w2"), Running(ward, "w3"):
            await ward.pass_s(40 * NEXT_LOOK_S)
            is_away[0] = False
            await ward.until(lambda: ward.of(events.Repaired), 40 * NEXT_LOOK_S)

    ward.play(story())
    assert not [cause for cause in ward.causes if "died" in cause]
