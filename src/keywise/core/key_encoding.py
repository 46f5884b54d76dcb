"""Keys as a store keeps them: as UTF-8, or in 17 bytes if they are written as UUIDs are."""

import re
import uuid

UUID_LENGTH, UUID_MARK = 36, b"\xff"
"""No text begins with this byte in UTF-8."""


def encoded(key: str) -> bytes:
    """A key as it is stored; `decoded` gives it back."""
    if len(key) == UUID_LENGTH and _UUID(key) is not None:
        return UUID_MARK + bytes.fromhex(key.replace("-", ""))
    return key.encode()


def decoded(code: bytes) -> str:
    return str(uuid.UUID(bytes=code[1:])) if code[:1] == UUID_MARK else code.decode()


_UUID = re.compile("[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}").fullmatch
