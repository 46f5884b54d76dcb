"""Errors of the AWS client library as ours: what may pass becomes `UnavailableError`, and the rest says what to do."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConfigParseError,
    InvalidConfigError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    SSLError,
    SSOTokenLoadError,
    UnauthorizedSSOTokenError,
)
from botocore.parsers import ResponseParserError

from keywise.core.errors import DatabaseError, UnavailableError

RIGHTS = "sqs:ReceiveMessage, DeleteMessage, ChangeMessageVisibility, GetQueueAttributes, GetQueueUrl and SendMessage"
CREDENTIALS = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, the profile or the role, and the region of the URL"

MISSING_QUEUE = {"QueueDoesNotExist", "NonExistentQueue", "QueueDeletedRecently"}
_ADVICE = {
    **dict.fromkeys(MISSING_QUEUE, "create the queue, or check the account and the region in the URL"),
    **dict.fromkeys(("AccessDenied", "AuthorizationError", "403"), f"allow {RIGHTS} on the queue"),
    **dict.fromkeys(
        (
            *("InvalidClientTokenId", "UnrecognizedClient", "InvalidAccessKeyId", "SignatureDoesNotMatch"),
            *("InvalidSignature", "IncompleteSignature", "MissingAuthenticationToken", "AuthFailure"),
            *("InvalidSecurity", "OptInRequired", "InvalidToken"),
        ),
        CREDENTIALS,
    ),
    **dict.fromkeys(("ExpiredToken", "RequestExpired"), "renew the credentials, and check the clock of this machine"),
    **dict.fromkeys(
        (
            *("KmsAccessDenied", "KmsDisabled", "KmsNotFound", "KmsInvalidState", "KmsInvalidKeyUsage"),
            "KmsOptInRequired",
        ),
        "check the KMS key of the queue, and allow kms:Decrypt and kms:GenerateDataKey",
    ),
    **dict.fromkeys(("InvalidAddress", "InvalidAction", "UnknownOperation"), "check that the URL names an SQS queue"),
}
_PASSING = {
    *("RequestThrottled", "Throttling", "KmsThrottled", "TooManyRequests", "RequestLimitExceeded", "SlowDown"),
    *("InternalError", "InternalFailure", "ServiceUnavailable", "RequestTimeout", "OverLimit"),
}
_ODD_ANSWERS = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What the parser of the client library raises for an answer that has the wrong shape or is not UTF-8."""
_NO_CREDENTIALS = (NoCredentialsError, PartialCredentialsError, SSOTokenLoadError, UnauthorizedSSOTokenError)
_WRONG_CONFIGURATION = (ProfileNotFound, InvalidConfigError, ConfigParseError)


@contextmanager
def sqs_errors(name: str, *, at_start: bool = False) -> Iterator[None]:
    """Convert what the client library raises. A queue that vanishes while a worker runs may be created again."""
    try:
        yield
    except ClientError as error:
        raise _refusal(error, name, at_start) from error
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
        raise UnavailableError(f"{name}: the answer is not one of SQS; check the host and the proxy") from error


def error_code(error: ClientError) -> str:
    """The code of a refusal, without the decorations that differ between protocols."""
    code = str(error.response.get("Error", {}).get("Code", ""))
    return code.rpartition(".")[2].removesuffix("Exception")


def failed_entries(answer: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """The entries of a batch that failed, or that the answer leaves out: then it is not from SQS."""
    failed = [*answer.get("Failed", ())]
    left_out = count - len(failed) - len(answer.get("Successful", ()))
    return failed + [{"Message": "the answer leaves them out; check the host and the proxy"}] * left_out


def _refusal(error: ClientError, name: str, at_start: bool) -> DatabaseError | UnavailableError:
    code, status = error_code(error), error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    said = error.response.get("Error", {}).get("Message") or code
    if code == "OverLimit":
        return UnavailableError(f"{name}: too many messages are in flight; ack or release some, or raise the quota")
    if code in _PASSING or status >= 500:
        return UnavailableError(f"{name}: {said}")
    if code in MISSING_QUEUE and not at_start:
        return UnavailableError(f"{name}: {said}; {_ADVICE[code]}")
    if code in _ADVICE and (at_start or not code.isdigit()):
        return DatabaseError(f"{name}: {said} ({code}); {_ADVICE[code]}")
    if code.isdigit() or not code:
        # The answer has no code of SQS, so a proxy or a gateway gave it.
        return UnavailableError(f"{name}: HTTP status {status}: {said}")
    return DatabaseError(f"{name}: {said} ({code})")
