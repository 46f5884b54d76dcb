"""The barrier of a swap, in the controls of both targets: the ledger grants claims only to the holder of its token.

The token is that of the claim under which one worker catches up and swaps. Tokens grow, so a worker that was stopped
and has lost its claim cannot take the barrier back from its successor.
"""

from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from keywise.core.controls import Controls, Move
from keywise.flow.pipeline import LEDGER, OpenPipeline


class OvertakenError(Exception):
    """Another worker has taken over, so this one must not change anything any more."""


class Barrier:
    """Sets and lifts the barrier of both targets, as the holder of one token.

    Every method raises `OvertakenError`, and changes nothing, if the controls have a higher token.
    """

    def __init__(self, live: OpenPipeline, other: OpenPipeline, token: int) -> None:
        self._live, self._other = live, other
        self._token = token

    async def take_over(self, before: str, after: str) -> Controls:
        """Set the barrier of the other target, where it stays, and take over a swap that another worker has begun.

        Return the controls, with the barrier of that swap; without one, if there was no swap.
        """
        move = Move(before, after, self._token)
        await self._change(self._other, lambda controls: replace(controls, move=move))
        return await self.take_over_live()

    async def take_over_live(self) -> Controls:
        """Take over the barrier of the live target, if there is one; return the controls."""
        return await self._change(self._live, self._with_token)

    async def set_live(self, before: str, after: str) -> Controls:
        """Set the barrier of the live target, and return the controls.

        From here on the ledger refuses every claim and every decision without the token. The barrier is not set if an
        operator has ended the run, because no worker would lift it.
        """
        move = Move(before, after, self._token)
        return await self.change_live(
            lambda controls: replace(controls, move=move) if is_wanted(controls, move) else controls
        )

    async def lift(self) -> None:
        """Lift the barrier of the live target: the swap is called off. Does nothing if the swap can only go forward."""
        await self.change_live(lambda controls: controls if _is_called(controls) else replace(controls, move=None))

    async def check(self) -> None:
        """Raise `OvertakenError` if another worker has taken over; else do nothing."""
        await self._change(self._live, lambda controls: controls)

    async def change_live(self, change: Callable[[Controls], Controls]) -> Controls:
        """Change the controls of the live target in one step. `change` may be called again after a lost answer."""
        return await self._change(self._live, change)

    def _with_token(self, controls: Controls) -> Controls:
        return controls if controls.move is None else replace(controls, move=replace(controls.move, token=self._token))

    async def _change(self, pipeline: OpenPipeline, change: Callable[[Controls], Controls]) -> Controls:
        store = pipeline.control_store
        while True:
            before = await pipeline.retry_until_reachable(LEDGER, store.controls)
            if before.swap_token > self._token:
                raise OvertakenError
            after = replace(change(before), swap_token=self._token)
            if after == before:
                return after  # The answer to an earlier call was lost.
            if await pipeline.retry_until_reachable(LEDGER, partial(store.replace_controls, before, after)):
                pipeline.controls = after
                return after


def is_wanted(controls: Controls, move: Move) -> bool:
    """Whether the run whose target takes the name is still going on."""
    run = controls.run
    return run is not None and run.is_active and run.into == move.after


def _is_called(controls: Controls) -> bool:
    return controls.move is not None and controls.move.is_called
