"""The scripts of the ledger, from the files in `lua/`, which say what each of them does and which arguments it takes.

The scripts compare bytes, keep the indexes of what was written, and tell the server's time. They know no rules, but for
one: `claim_plain` grants what every rule would grant.
Numbers that need all 64 bits stay bytes; those that Lua counts with stay below 2^53.
A script that frees memory, or that whoever frees it needs, also runs when all memory that Redis may use is used.
"""

from importlib.resources import files

from keywise.adapters.redis.script import Script


def _script(*names: str, frees: bool = False) -> Script:
    folder = files(__package__) / "lua"
    return Script("".join((folder / f"{name}.lua").read_text("utf-8") for name in names), frees=frees)


OPEN = _script("open", frees=True)
READ = _script("guard", "read", frees=True)
SWAP = _script("guard", "swap")
SWAP_FREEING = _script("guard", "swap", frees=True)
CLAIM_PLAIN = _script("guard", "claim_plain")
COMMIT_PLAIN = _script("guard", "commit_plain", frees=True)

SET_CONTROLS = _script("guard", "set_controls", frees=True)
COUNT = _script("guard", "count", frees=True)
PERIODIC_LOCK = _script("guard", "periodic_lock", frees=True)
PROBE = _script("guard", "periodic_lock")
"""Finds out whether there is memory left."""

WALK = _script("guard", "skip", "walk", frees=True)
FIELDS = _script("guard", "skip", "fields", frees=True)

RECORD = _script("guard", "record")
RECORD_ONE = _script("guard", "record", frees=True)
"""For an act that is done, and must be told though all memory is used."""
LINES_OF = _script("guard", "lines_of", frees=True)
TRIM = _script("guard", "trim", frees=True)

DROP = _script("guard", "drop", frees=True)
KEEP = _script("guard", "keep")
FLOOR = _script("guard", "floor", frees=True)
HOLDING = _script("holding", frees=True)
