"""The backends of turns that need no server keep the promises of their protocol."""

import pytest

from adapters.serial_benches import TURNS
from keywise.testing.conformance import turns_promises
from running import run


@pytest.mark.parametrize(
    ("make", "promise"),
    [
        pytest.param(make, promise, id=f"{name}-{promise.name}")
        for makes in TURNS.values()
        for name, make in makes.items()
        for promise in turns_promises()
    ],
)
def test_turns_keep_their_promises(make, promise):
    run(promise(make))
