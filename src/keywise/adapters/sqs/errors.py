"""What the error codes of SQS mean, and which entries of a batch failed."""

from typing import Any

from keywise.adapters.aws.errors import CREDENTIAL_ADVICE, PASSING, ErrorCodes

RIGHTS = "sqs:ReceiveMessage, DeleteMessage, ChangeMessageVisibility, GetQueueAttributes, GetQueueUrl and SendMessage"

MISSING_QUEUE = frozenset(("QueueDoesNotExist", "NonExistentQueue", "QueueDeletedRecently"))
SQS_CODES = ErrorCodes(
    service="SQS",
    missing=MISSING_QUEUE,
    advice={
        **dict.fromkeys(MISSING_QUEUE, "create the queue, or check the account and the region in the URL"),
        **dict.fromkeys(("AccessDenied", "AuthorizationError", "403"), f"allow {RIGHTS} on the queue"),
        **CREDENTIAL_ADVICE,
        **dict.fromkeys(
            (
                *("KmsAccessDenied", "KmsDisabled", "KmsNotFound", "KmsInvalidState", "KmsInvalidKeyUsage"),
                "KmsOptInRequired",
            ),
            "check the KMS key of the queue, and allow kms:Decrypt and kms:GenerateDataKey",
        ),
        **dict.fromkeys(
            ("InvalidAddress", "InvalidAction", "UnknownOperation"), "check that the URL names an SQS queue"
        ),
    },
    passing=PASSING
    | {"RequestThrottled", "Throttling", "KmsThrottled", "TooManyRequests", "RequestLimitExceeded", "SlowDown"},
    overfull={"OverLimit": "too many messages are in flight; ack or release some, or raise the quota"},
)


def failed_entries(answer: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """The entries of a batch that failed, or that the answer leaves out: then it is not from SQS."""
    failed = [*answer.get("Failed", ())]
    left_out = count - len(failed) - len(answer.get("Successful", ()))
    return failed + [{"Message": "the answer leaves them out; check the host and the proxy"}] * left_out
