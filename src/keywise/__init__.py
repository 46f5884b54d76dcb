"""Queues deliver twice, late and out of order; keywise makes your store end up right anyway."""

from keywise.app import App
from keywise.config import load
from keywise.core.change import Change, Delete, Delivery, Ignore, Outcome, Put, version_of
from keywise.core.entry import Claim
from keywise.core.errors import KeywiseError, OutcomeUnknownError, PermanentError, TransientError
from keywise.core.limits import Debounce, Rate, Snooze
from keywise.core.record import Record
from keywise.core.settings import Settings
from keywise.core.sink import Grade
from keywise.core.transaction import Transaction
from keywise.observe.counters import Counters
from keywise.observe.log import Log
from keywise.options import Retry

__version__ = "0.2.0"

__all__ = [
    "App",
    "Change",
    "Claim",
    "Counters",
    "Debounce",
    "Delete",
    "Delivery",
    "Grade",
    "Ignore",
    "KeywiseError",
    "Log",
    "Outcome",
    "OutcomeUnknownError",
    "PermanentError",
    "Put",
    "Rate",
    "Record",
    "Retry",
    "Settings",
    "Snooze",
    "Transaction",
    "TransientError",
    "load",
    "version_of",
]
