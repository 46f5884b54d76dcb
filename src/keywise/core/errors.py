"""Every exception that keywise raises on purpose; each message says what to do."""


class KeywiseError(Exception):
    """The base class of all errors raised by keywise."""


class SettingsError(KeywiseError):
    """A setting, an option or a combination of them cannot work. It is raised before anything starts."""


class AddressError(SettingsError):
    """A URL names no adapter, or has a part or an option that its adapter does not know."""


class MissingExtraError(AddressError):
    """The adapter exists, but the client library that it needs is not installed."""


class VersionError(KeywiseError):
    """A version is not a signed 64-bit integer and cannot be converted to one."""


class PositionError(KeywiseError):
    """A position has a place that is not a number from 0 to 2**63 - 1, or a note that is too long."""


class MalformedError(KeywiseError):
    """A delivery cannot be read as a change. It becomes a dead letter."""


class UnavailableError(KeywiseError):
    """A source, ledger or sink cannot be reached now. Whether the call took effect is unknown; try again."""


class ThrottledError(UnavailableError):
    """A service refused a call because too many came. The caller slows down, and repeats it."""


class TransactionFailedError(UnavailableError):
    """The database rolled a transaction back because of what ran in it, or in another one at the same time.

    The store can be reached. If several changes shared the transaction, any of them may be the reason.
    """


class DatabaseError(KeywiseError):
    """A database cannot be used: it is missing, read-only or corrupt, access is denied, or a newer keywise wrote it."""


class ObjectError(KeywiseError):
    """An object cannot be read: its content is not what its format says, or its name cannot be asked for.

    A retry cannot help. The object becomes a dead letter.
    """


class ObjectReplacedError(KeywiseError):
    """An object was replaced while it was read. What was read so far is dropped, and it is read again."""


class ObjectAccessError(KeywiseError):
    """An object store refused a request. Whether the object exists is unknown."""


class OriginError(KeywiseError):
    """An origin cannot be read as it is set up, or broke its contract. The message says what to change."""


class PermanentError(KeywiseError):
    """Raise it in a handler if nothing was written and a retry cannot help. The change becomes a dead letter."""


class TransientError(KeywiseError):
    """Raise it in a handler if nothing was written and a retry may help. It costs an attempt."""


class OutcomeUnknownError(KeywiseError):
    """Raise it in a handler if a call was sent and got no answer: it may still take effect.

    keywise then keeps the key claimed until the lease has expired.
    """


class LetterError(KeywiseError):
    """A dead letter does not exist, or cannot be replayed because a newer version was applied."""


class AdminError(KeywiseError):
    """An operator's command was refused or failed. The message says what was done and what was not."""


class SerialError(KeywiseError):
    """A call of a serial function has no result. The message says why, and what to do."""


class RefusedError(SerialError):
    """A call was not accepted and has not run. Raise it in a key function if the request has no single key."""


class ExpiredError(SerialError):
    """The deadline of a call passed before it could start. It will not run; the same id may be used again."""


class RequestCancelledError(SerialError):
    """An operator cancelled a call that was waiting. It has not run and will not."""


class FailedError(SerialError):
    """The function of a call raised, or returned a value that cannot be stored. A call with the same id fails again."""


class LostError(SerialError, OutcomeUnknownError):
    """A call was interrupted while it ran. How much of it took effect is unknown, and it is not run again."""


class UnansweredError(SerialError, OutcomeUnknownError):
    """A call has started, and its answer did not arrive in time. Call again with the same id to get the answer."""
