"""What the error codes of DynamoDB mean."""

from keywise.adapters.aws.errors import CREDENTIAL_ADVICE, PASSING, ErrorCodes

SINK_RIGHTS = "dynamodb:DescribeTable, GetItem, PutItem, UpdateItem, DeleteItem and BatchGetItem"
ORIGIN_RIGHTS = "dynamodb:DescribeTable, Scan and BatchGetItem"

MISSING_TABLE = "ResourceNotFound"
CONDITION_FAILED = "ConditionalCheckFailed"
INVALID = "Validation"
IN_TRANSACTION = "TransactionConflict"
"""Another program writes the item in a transaction."""
DYNAMODB_CODES = ErrorCodes(
    service="DynamoDB",
    missing=frozenset((MISSING_TABLE,)),
    advice={
        MISSING_TABLE: "create the table, or check its name, the region and the account of the credentials",
        **dict.fromkeys(
            ("AccessDenied", "403"), f"allow {SINK_RIGHTS} on the table of a sink, and {ORIGIN_RIGHTS} on an origin's"
        ),
        **CREDENTIAL_ADVICE,
        "UnknownOperation": "check that the endpoint of the URL is DynamoDB",
    },
    passing=PASSING | {"InternalServerError", "InternalServer"},
    throttled=frozenset(
        ("ProvisionedThroughputExceeded", "Throttling", "ThrottlingError", "RequestLimitExceeded", "SlowDown")
    ),
)
