"""Claims and commits of plain changes, each in one step: the server compares, and no entry is read.

A change is plain if it has a version and belongs to no era and no reindex. Almost every change is, and almost every
one meets an idle key with a lower mark, no pause and no rate: then all rules grant it, and no rule has to be asked.
"""

import math
import secrets
import struct
from collections.abc import Sequence
from itertools import count
from typing import Any, TypeVar

from redis.exceptions import OutOfMemoryError

from keywise.adapters.redis.ledger.scope import RedisScope
from keywise.adapters.redis.ledger.scripts import CLAIM_PLAIN, COMMIT_PLAIN
from keywise.adapters.redis.ledger.working_set import TOKEN_NONCE_BITS
from keywise.core.change import ChangeHeader
from keywise.core.controls import Controls
from keywise.core.entry import Claim, LeaseTerms, LedgerPolicy
from keywise.core.errors import UnavailableError
from keywise.core.key_encoding import encoded

AT_ONCE = 1_000
"""Lua passes at most 8,000 values to one call; a claim is two of them."""
CONTROLS = b"controls"
"""The answer of a script that leaves all keys to the rules, because an era, a pause or a barrier is set."""

_One = TypeVar("_One", ChangeHeader, Claim)


class RedisPlainClaims:
    """The plain claims of one scope."""

    def __init__(self, scope: RedisScope, policy: LedgerPolicy) -> None:
        self._scope = scope
        self._policy = policy
        self.is_worth_trying = policy.rate is None
        """False if keys have a rate, or if an era, a pause or a barrier was set when the controls were last seen."""

    def saw(self, controls: Controls) -> None:
        """Note the controls: while an era, a pause or a barrier is set, the rules decide every claim."""
        self.is_worth_trying = self._policy.rate is None and controls.is_plain

    async def claim(self, headers: Sequence[ChangeHeader], terms: LeaseTerms) -> list[Claim]:
        """Claim keys that are idle, at plain changes that are newer; return the claims. The headers name a key once."""
        plain, granted = _plain(headers), list[Claim]()
        try:
            for start in range(0, len(plain), AT_ONCE):
                granted += await self._claim(plain[start : start + AT_ONCE], terms)
        except UnavailableError as error:
            # If all memory is used, the rules can still refuse what is stale.
            if not isinstance(error.__cause__, OutOfMemoryError):
                raise
        return granted

    async def commit(self, claims: Sequence[Claim]) -> set[int]:
        """Commit plain claims that nothing but a renewal has happened to; return their tokens.

        The claims name a key once.
        """
        plain, committed = _plain(claims), set[int]()
        for start in range(0, len(plain), AT_ONCE):
            committed |= await self._commit(plain[start : start + AT_ONCE])
        return committed

    async def _claim(self, headers: Sequence[ChangeHeader], terms: LeaseTerms) -> list[Claim]:
        policy = self._policy
        retention_s = oldest = ""
        if policy.retention_s is not None:
            sent_at = min([header.sent_at for header in headers])
            if sent_at != math.inf:
                retention_s, oldest = repr(policy.retention_s), repr(sent_at)
        nonce = secrets.randbits(TOKEN_NONCE_BITS)
        seq, own, first, others = await self._scope.call(
            CLAIM_PLAIN,
            repr(terms.lease_s),
            repr(policy.redelivery_s) if policy.intents else "",
            retention_s,
            oldest,
            nonce,
            bytes([policy.intents]) + terms.owner.encode(),
            struct.pack(f">{len(headers)}q", *[header.order[1] for header in headers]),  # type: ignore[index]
            *self._places([header.key for header in headers]),
        )
        self._scope.saw(seq, own)
        if others == CONTROLS:
            self.is_worth_trying = False
            return []
        tokens = count(int(first) << TOKEN_NONCE_BITS | nonce, 1 << TOKEN_NONCE_BITS)
        with_tokens = zip(headers, tokens, strict=False)
        claims = [Claim(header.key, header.order, header.deleted, token) for header, token in with_tokens]
        return _without(claims, others)

    async def _commit(self, claims: list[Claim]) -> set[int]:
        numbers = [number for claim in claims for number in (claim.token, claim.order[1])]  # type: ignore[index]
        seq, own, others = await self._scope.call(
            COMMIT_PLAIN,
            struct.pack(f">{len(numbers)}q", *numbers),
            bytes([claim.deleted for claim in claims]),
            *self._places([claim.key for claim in claims]),
        )
        self._scope.saw(seq, own)
        return {claim.token for claim in _without(claims, others)}

    def _places(self, keys: Sequence[str]) -> list[Any]:
        """The codes of keys, then their buckets."""
        codes = [encoded(key) for key in keys]
        return [*codes, *map(self._scope.bucket, codes)]


def _plain(ones: Sequence[_One]) -> list[_One]:
    """Those that a script can judge: versioned, of no era, and not from a reindex."""
    return [one for one in ones if (order := one.order) is not None and order[0] == 0 == order[2]]


def _without(claims: list[Claim], places: list[int]) -> list[Claim]:
    if not places:
        return claims
    gone = set(places)
    return [claim for place, claim in enumerate(claims) if place not in gone]
