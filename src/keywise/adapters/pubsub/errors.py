"""Errors of gRPC as ours: what may pass becomes `UnavailableError`, and the rest says what to do."""

from collections.abc import Iterator
from contextlib import contextmanager

from google.api_core.exceptions import from_grpc_error
from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
from grpc import StatusCode
from grpc.aio import AioRpcError

from keywise.core.errors import DatabaseError, UnavailableError

ROLES = (
    "roles/pubsub.subscriber and roles/pubsub.viewer on the subscription, and roles/pubsub.publisher on its topic "
    "for keywise send"
)
MISSING = "create the subscription and its topic, or check the project in the URL"

_ADVICE = {
    StatusCode.NOT_FOUND: MISSING,
    StatusCode.PERMISSION_DENIED: f"grant {ROLES}",
    StatusCode.UNAUTHENTICATED: "check GOOGLE_APPLICATION_CREDENTIALS, or the service account of the machine",
    StatusCode.UNIMPLEMENTED: "check that endpoint= or emulator= names a Pub/Sub service",
}
_FINAL = {
    *_ADVICE,
    StatusCode.INVALID_ARGUMENT,
    StatusCode.FAILED_PRECONDITION,
    StatusCode.OUT_OF_RANGE,
    StatusCode.ALREADY_EXISTS,
}
"""Codes for which the same call would fail again. Any other one may pass."""


@contextmanager
def pubsub_errors(name: str, *, at_start: bool = False) -> Iterator[None]:
    """Convert what the client library raises. A subscription that vanishes while a worker runs may be created again."""
    try:
        yield
    except AioRpcError as error:
        raise _refusal(error, name, at_start) from error
    except DefaultCredentialsError as error:
        raise DatabaseError(
            f"{name}: there are no credentials; set GOOGLE_APPLICATION_CREDENTIALS, or give the machine a service "
            "account; for an emulator, set PUBSUB_EMULATOR_HOST or emulator= in the URL"
        ) from error
    except (GoogleAuthError, OSError) as error:
        raise UnavailableError(f"{name}: {error}") from error


def refused_receipts(error: AioRpcError) -> dict[str, str]:
    """Return the receipts that a subscription with exactly-once delivery has refused, each with the reason."""
    found = from_grpc_error(error)
    return {
        receipt: reason
        for receipt, reason in (found.metadata or {}).items()
        if reason.startswith(("PERMANENT_FAILURE", "TRANSIENT_FAILURE"))
    }


def _refusal(error: AioRpcError, name: str, at_start: bool) -> DatabaseError | UnavailableError:
    code, said = error.code(), error.details() or error.code().name
    if code is StatusCode.NOT_FOUND and not at_start:
        return UnavailableError(f"{name}: {said}; {MISSING}")
    if code in _FINAL:
        advice = f"; {_ADVICE[code]}" if code in _ADVICE else ""
        return DatabaseError(f"{name}: {said} ({code.name}){advice}")
    return UnavailableError(f"{name}: {said} ({code.name})")
