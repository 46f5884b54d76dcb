"""Queues deliver twice, late and out of order; keywise makes your store end up right anyway."""

from keywise.app import App
from keywise.change import Change, Delete, Ignore, Outcome, Put, version_of
from keywise.configuration import load
from keywise.errors import KeywiseError, OutcomeUnknownError, PermanentError, TransientError
from keywise.events import Figures, Log
from keywise.limits import Debounce, Rate, Snooze
from keywise.options import Retry
from keywise.protocols import Grade, Transaction
from keywise.rules import Claim
from keywise.settings import Settings

__version__ = "0.1.0"

__all__ = [
    "App",
    "Change",
    "Claim",
    "Debounce",
    "Delete",
    "Figures",
    "Grade",
    "Ignore",
    "KeywiseError",
    "Log",
    "Outcome",
    "OutcomeUnknownError",
    "PermanentError",
    "Put",
    "Rate",
    "Retry",
    "Settings",
    "Snooze",
    "Transaction",
    "TransientError",
    "load",
    "version_of",
]
