"""How a store encodes keys: as UTF-8, or in 17 bytes if the key is a UUID in its canonical spelling."""

import uuid

UUID_LENGTH, UUID_BYTES, UUID_MARK = 36, 16, b"\xff"
"""The mark byte begins no UTF-8 text, so an encoded UUID cannot be confused with an encoded text."""


def encoded(key: str) -> bytes:
    """Return the stored form of a key; `decoded` is the inverse."""
    if len(key) == UUID_LENGTH and key[8:24:5] == "----":
        digits = key.replace("-", "")
        try:
            code = bytes.fromhex(digits)
        except ValueError:
            return key.encode()
        if code.hex() == digits and len(code) == UUID_BYTES:  # Else `decoded` would spell it differently.
            return UUID_MARK + code
    return key.encode()


def decoded(code: bytes) -> str:
    return str(uuid.UUID(bytes=code[1:])) if code[:1] == UUID_MARK else code.decode()
