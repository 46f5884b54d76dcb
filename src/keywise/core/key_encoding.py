"""How a store encodes keys: as UTF-8, or in 17 bytes if the key is a UUID in its canonical spelling."""

import re
import uuid

UUID_LENGTH, UUID_MARK = 36, b"\xff"
"""The mark byte begins no UTF-8 text, so an encoded UUID cannot be confused with an encoded text."""


def encoded(key: str) -> bytes:
    """Return the stored form of a key; `decoded` is the inverse."""
    if len(key) == UUID_LENGTH and _UUID(key) is not None:
        return UUID_MARK + bytes.fromhex(key.replace("-", ""))
    return key.encode()


def decoded(code: bytes) -> str:
    return str(uuid.UUID(bytes=code[1:])) if code[:1] == UUID_MARK else code.decode()


_UUID = re.compile("[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}").fullmatch
