"""Causes in tests: what an error says, without the line of the test that raised it."""

import re


def said(cause: str) -> str:
    return re.sub(r" \(\S+, line \d+, in \S+\)$", "", cause)
