"""The barrier of a swap, in the controls of both targets: nothing is claimed there, except by the holder of its token.

The token is that of the claim under which one worker catches up and swaps. Tokens grow, so a worker that was stopped
and has lost its claim cannot take the barrier back from its successor.
"""

from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from keywise.core.controls import Controls, Move
from keywise.flow.pipeline import LEDGER, OpenPipeline


class OvertakenError(Exception):
    """Another worker has taken over, so this one has to leave everything as it is."""


class Barrier:
    """Changes the controls of both targets as the holder of one token."""

    def __init__(self, live: OpenPipeline, other: OpenPipeline, token: int) -> None:
        self._live, self._other = live, other
        self._token = token

    async def take_over(self, before: str, after: str) -> Move | None:
        """Close the other target to everyone else, and take over a swap that was begun; return its barrier."""
        move = Move(before, after, self._token)
        await self._change(self._other, lambda controls: replace(controls, move=move))
        controls = await self._change(self._live, self._with_token)
        return controls.move

    async def raise_for(self, before: str, after: str) -> Controls:
        """Close the live target: whatever is decided about a change from here on is refused."""
        move = Move(before, after, self._token)
        return await self.change_live(lambda controls: replace(controls, move=move))

    async def lift(self) -> None:
        """Open the live target again: the swap was called off. It does nothing if the swap can only go forward."""
        await self.change_live(lambda controls: controls if _is_called(controls) else replace(controls, move=None))

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


def _is_called(controls: Controls) -> bool:
    return controls.move is not None and controls.move.is_called
