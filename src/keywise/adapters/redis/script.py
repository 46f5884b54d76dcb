"""A Lua script that a Redis server runs in one step."""

import hashlib


class Script:
    """A script, and the name under which a server remembers it."""

    def __init__(self, body: str, *, frees: bool = False) -> None:
        flags = "#!lua flags=allow-oom\n" if frees else "#!lua\n"
        self.text = (flags + body).encode()
        self.sha = hashlib.sha1(self.text, usedforsecurity=False).hexdigest()
