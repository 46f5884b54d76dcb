"""Errors of the AWS client library as ours: what may pass becomes `UnavailableError`, and the rest says what to do."""

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager

import aiohttp
import msgspec
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConfigParseError,
    ConnectTimeoutError,
    EndpointConnectionError,
    InvalidConfigError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    ProxyConnectionError,
    SSLError,
    SSOTokenLoadError,
    UnauthorizedSSOTokenError,
)
from botocore.parsers import ResponseParserError

from keywise.core.errors import DatabaseError, KeywiseError, ThrottledError, UnavailableError

CREDENTIALS = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, the profile or the role, and the region of the URL"
CREDENTIAL_ADVICE = {
    **dict.fromkeys(
        (
            *("InvalidClientTokenId", "UnrecognizedClient", "InvalidAccessKeyId", "SignatureDoesNotMatch"),
            *("InvalidSignature", "IncompleteSignature", "MissingAuthenticationToken", "AuthFailure"),
            *("InvalidSecurity", "OptInRequired", "InvalidToken"),
        ),
        CREDENTIALS,
    ),
    **dict.fromkeys(("ExpiredToken", "RequestExpired"), "renew the credentials, and check the clock of this machine"),
}
"""What to do about the codes that every service has for credentials."""
PASSING = frozenset(("InternalError", "InternalFailure", "ServiceUnavailable", "RequestTimeout"))

_ODD_ANSWERS = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What the parser of the client library raises for an answer that has the wrong shape or is not UTF-8."""
_NO_CREDENTIALS = (NoCredentialsError, PartialCredentialsError, SSOTokenLoadError, UnauthorizedSSOTokenError)
_WRONG_CONFIGURATION = (ProfileNotFound, InvalidConfigError, ConfigParseError)
_NOT_SENT = (EndpointConnectionError, ConnectTimeoutError, ProxyConnectionError)


class ErrorCodes(msgspec.Struct, frozen=True, kw_only=True):
    """What the error codes of one service mean."""

    service: str
    """Its name in messages; in small letters, that of the client library."""
    advice: Mapping[str, str]
    """What to do about a code that a retry cannot help with."""
    missing: Set[str]
    """A queue or a table is not there. While a worker runs, it may be created again."""
    passing: Set[str] = PASSING
    throttled: Set[str] = frozenset()
    overfull: Mapping[str, str] = {}
    """What a code of a limit means, in place of the words of the service; it passes too."""


@contextmanager
def aws_errors(name: str, codes: ErrorCodes, *, at_start: bool = False) -> Iterator[None]:
    """Convert what the client library raises."""
    try:
        yield
    except ClientError as error:
        raise _refusal(error, name, codes, at_start) from error
    except _NO_CREDENTIALS as error:
        raise DatabaseError(
            f"{name}: {error}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or profile= in the URL, or give the "
            "machine a role"
        ) from error
    except _WRONG_CONFIGURATION as error:
        raise DatabaseError(f"{name}: {error}; check the AWS configuration of this machine") from error
    except SSLError as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise DatabaseError(f"{name}: {error}; set AWS_CA_BUNDLE to the authority that signed it") from error
        raise UnavailableError(f"{name}: {error}") from error
    except TimeoutError as error:
        raise UnavailableError(f"{name}: no answer in time; check the host, the network and the proxy") from error
    except (BotoCoreError, ResponseParserError, aiohttp.ClientError, OSError) as error:
        raise UnavailableError(f"{name}: {error}") from error
    except _ODD_ANSWERS as error:
        raise UnavailableError(
            f"{name}: the answer is not one of {codes.service}; check the host and the proxy"
        ) from error


def error_code(error: ClientError) -> str:
    """The code of a refusal, without the decorations that differ between protocols."""
    code = str(error.response.get("Error", {}).get("Code", ""))
    return code.rpartition(".")[2].removesuffix("Exception")


def refusal_of(error: KeywiseError) -> ClientError | None:
    """The refusal of the service that became this error; None if the service did not answer."""
    return error.__cause__ if isinstance(error.__cause__, ClientError) else None


def was_sent(error: KeywiseError) -> bool:
    """Whether the request of a failed call may have reached the service."""
    return not isinstance(error.__cause__, _NOT_SENT)


def _refusal(error: ClientError, name: str, codes: ErrorCodes, at_start: bool) -> DatabaseError | UnavailableError:
    code, status = error_code(error), error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    said = error.response.get("Error", {}).get("Message") or code
    if code in codes.overfull:
        return UnavailableError(f"{name}: {codes.overfull[code]}")
    if code in codes.throttled:
        return ThrottledError(f"{name}: {said} ({code})")
    if code in codes.passing or status >= 500:
        return UnavailableError(f"{name}: {said}")
    if code in codes.missing and not at_start:
        return UnavailableError(f"{name}: {said}; {codes.advice[code]}")
    if code in codes.advice and (at_start or not code.isdigit()):
        return DatabaseError(f"{name}: {said} ({code}); {codes.advice[code]}")
    if code.isdigit() or not code:
        # The answer has no code of the service, so a proxy or a gateway gave it.
        return UnavailableError(f"{name}: HTTP status {status}: {said}")
    return DatabaseError(f"{name}: {said} ({code})")
