"""Every exception that keywise raises on purpose; each message says what to do."""


class KeywiseError(Exception):
    """The root of all errors raised by keywise."""


class SettingsError(KeywiseError):
    """A setting, option or combination of them that cannot work; raised before anything starts."""


class AddressError(SettingsError):
    """A URL that names no adapter, or says something that its adapter does not understand."""


class MissingExtraError(AddressError):
    """The adapter exists, but the library it needs is not installed."""


class VersionError(KeywiseError):
    """A version that is no signed 64-bit integer and cannot be made one."""


class MalformedError(KeywiseError):
    """A delivery that cannot become a change; it ends as a dead letter."""


class UnavailableError(KeywiseError):
    """A source, ledger or sink that cannot be reached now. Nothing is known to have happened; try again."""


class DatabaseError(KeywiseError):
    """A database that cannot be used: missing, read-only, corrupt, not allowed, or from a newer keywise."""


class PermanentError(KeywiseError):
    """Raise it in a handler: nothing was written, and trying again cannot help. The change becomes a dead letter."""


class TransientError(KeywiseError):
    """Raise it in a handler: nothing was written, try again later. It costs an attempt."""


class OutcomeUnknownError(KeywiseError):
    """Raise it in a handler: a call was sent and no answer came, so it may still land. The lease has to run out."""


class LetterError(KeywiseError):
    """A dead letter that does not exist, or that may not be replayed because something newer was applied."""


class AdminError(KeywiseError):
    """An act of an operator's that was refused or could not be done; the message says what became of it."""


class SerialError(KeywiseError):
    """A call of a serial function that has no result; the message says why, and what to do."""


class RefusedError(SerialError):
    """Raise it in a key function: the request has no one key. Also: a call that was not taken in, and has not run."""


class ExpiredError(SerialError):
    """A call whose deadline passed before its turn came. It has not run and will not; the same id may be used again."""


class RequestCancelledError(SerialError):
    """A call that an operator took out of the line. It has not run and will not."""


class FailedError(SerialError):
    """A call whose function raised, or returned what cannot be stored and read. The same id has the same answer."""


class LostError(SerialError, OutcomeUnknownError):
    """A call that was broken off in the middle: nobody knows how much of it happened, and it is not run again."""


class UnansweredError(SerialError, OutcomeUnknownError):
    """A call that has begun and whose answer was not there in time. Ask again with the same id to get it."""
