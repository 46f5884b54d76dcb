"""The key of an object: its URI, or a prefix and a hash where the URI is longer than a key may be."""

import re
from hashlib import sha256

from keywise.core.change import KEY_MAX_BYTES
from keywise.core.errors import MalformedError

HASH_MARK = "~sha256:"
"""Stands between the prefix of a long URI and its hash."""


def object_key(uri: str) -> str:
    """Return the key of the object; two URIs never share one.

    A URI of at most 512 bytes is its own key. The key of a longer one keeps what fits of its beginning, so that an
    operator recognises it, and ends with the hash of the whole. Keep the URI beside such a key: it cannot be restored.
    Raises `MalformedError` if no ledger can store the URI.
    """
    if "\0" in uri:
        raise MalformedError(f"the URI {uri[:40]!r} contains NUL, which no ledger stores; rename the object")
    try:
        encoded = uri.encode()
    except UnicodeEncodeError:
        raise MalformedError(f"the URI {uri[:40]!r} contains a lone surrogate; rename the object") from None
    # An object may be named like the key of another one. It is hashed as well, or the two would share a key.
    if len(encoded) <= KEY_MAX_BYTES and not is_shortened(uri):
        return uri
    return _hashed(encoded, KEY_MAX_BYTES)


def shortened(key: str, most: int) -> str:
    """Return a key that has at most so many bytes: itself, or its beginning and its hash."""
    encoded = key.encode()
    return key if len(encoded) <= most else _hashed(encoded, most)


def _hashed(encoded: bytes, most: int) -> str:
    ending = HASH_MARK + sha256(encoded).hexdigest()
    # The cut may split a character, of which the rest is dropped.
    return encoded[: most - len(ending)].decode(errors="ignore") + ending


def is_shortened(uri: str) -> bool:
    """Whether a text ends like the key of a long URI."""
    # Only the end is looked at: a search through the whole costs more than all else that is done with a key.
    return _is_ending(uri[-ENDING_LENGTH:]) is not None


ENDING_LENGTH = len(HASH_MARK) + 64
_is_ending = re.compile(rf"{HASH_MARK}[0-9a-f]{{64}}").fullmatch
