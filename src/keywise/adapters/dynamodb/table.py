"""A table of DynamoDB, as a URL names it: where it is, what its key is called, and how many rows it has."""

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from keywise.adapters.aws.service import Answer, AwsService
from keywise.adapters.dynamodb.errors import DYNAMODB_CODES
from keywise.adapters.dynamodb.items import Item
from keywise.core.errors import AddressError, DatabaseError, ThrottledError, UnavailableError
from keywise.core.url import Address, redacted

OPTIONS = ("region", "endpoint", "profile")
"""What a URL may say about the connection."""
TOMBSTONE = "keywise_deleted"
"""The attribute of an item that stands for a deletion."""
READ_MAX = 100
"""The most keys that DynamoDB takes in one read."""
KEY_MAX_BYTES = 2048
"""The longest key that DynamoDB takes. It refuses a whole read if one of its keys is longer, or empty."""

_TABLE = re.compile(r"[A-Za-z0-9_.-]{3,255}")


class TableSize(msgspec.Struct, frozen=True):
    """How large a table is. DynamoDB counts about every six hours."""

    rows: int
    size_bytes: int


class DynamoTable:
    """One table. Its primary key has to be one attribute of type string."""

    def __init__(self, service: AwsService, name: str, key: str = "") -> None:
        self.service = service
        self.name = name
        self.key = key
        """The attribute of the primary key; empty until the table was found, unless the URL names it."""
        self._is_known = False

    async def open(self, connections: int) -> None:
        self._is_known = False
        await self.service.open(connections)

    async def close(self) -> None:
        await self.service.close()

    async def find(self) -> None:
        """Find the table and check its key, once; raises `DatabaseError` if it is missing or has another key."""
        if not self._is_known:
            await self.size()

    async def size(self) -> TableSize:
        answer = await self.service.answered(self.service.client.describe_table(TableName=self.name))
        found = answer["Table"]
        if found.get("TableStatus") in ("CREATING", "DELETING"):
            raise UnavailableError(f"{self.service.name}: the table is {found['TableStatus'].lower()}")
        self.key = self._checked_key(found)
        self._is_known = True
        self.service.started()
        return TableSize(int(found.get("ItemCount", 0)), int(found.get("TableSizeBytes", 0)))

    async def ask(self, action: str, **request: Any) -> Answer:
        """Send one request about this table."""
        call = getattr(self.service.client, action)
        return await self.service.answered(call(TableName=self.name, **request))

    async def items(self, keys: Sequence[str]) -> dict[str, Item]:
        """Read the items of these keys consistently. A key that has no item, or cannot have one, is left out.

        DynamoDB answers a part of a request if the items are large, or if it throttles. Raises `ThrottledError` if it
        answers none of it.
        """
        found: dict[str, Item] = {}
        left = [key for key in dict.fromkeys(keys) if 0 < len(key.encode()) <= KEY_MAX_BYTES]
        while asked := left[:READ_MAX]:
            request = {"Keys": [self.key_of(key) for key in asked], "ConsistentRead": True}
            answer = await self.service.answered(self.service.client.batch_get_item(RequestItems={self.name: request}))
            read = answer.get("Responses", {}).get(self.name, ())
            found |= {item[self.key]["S"]: item for item in read}
            skipped = answer.get("UnprocessedKeys", {}).get(self.name, {}).get("Keys", ())
            if len(skipped) == len(asked):
                raise ThrottledError(f"{self.service.name}: DynamoDB answered none of {len(asked)} keys")
            left = [one[self.key]["S"] for one in skipped] + left[READ_MAX:]
        return found

    async def find_again(self) -> None:
        """Check that the table is still there, with the same key."""
        self._is_known = False
        await self.find()

    def key_of(self, key: str) -> dict[str, Any]:
        return {self.key: {"S": key}}

    def _checked_key(self, found: Mapping[str, Any]) -> str:
        schema = found["KeySchema"]
        names = [part["AttributeName"] for part in schema]
        if len(names) > 1:
            raise DatabaseError(
                f"{self.service.name}: the primary key of the table is {' and '.join(names)}, and keywise has one key; "
                "use a table with a partition key only, for example one that holds both, joined by #"
            )
        if self.key and names != [self.key]:
            raise DatabaseError(
                f"{self.service.name}: the partition key of the table is {names[0]}, and not {self.key}; check the "
                f"table, or write key={names[0]} in the URL"
            )
        [kind] = [one["AttributeType"] for one in found["AttributeDefinitions"] if one["AttributeName"] == names[0]]
        if kind != "S":
            # Two texts, such as 1 and 1.0, would be one number.
            raise DatabaseError(
                f"{self.service.name}: the partition key {names[0]} has the type {kind}, and keys of keywise are text; "
                "use a table whose key has the type S"
            )
        return str(names[0])


def table_at(address: Address, options: Mapping[str, str]) -> DynamoTable:
    """The table of a URL. Credentials come from the environment, a profile or a role, never from the URL."""
    url = redacted(address.url)
    if "@" in address.host + options.get("endpoint", ""):
        # The text before the @ may be a password, so an endpoint with one is not shown.
        shown = url if "@" in address.host else f"the endpoint of dynamodb://{address.host}"
        raise AddressError(
            f"{shown} has a user; credentials never belong into the URL: set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, name a profile with profile=, or give the machine a role"
        )
    if address.path.strip("/"):
        raise AddressError(f"{url} has a path; write the table as the host: dynamodb://TABLE?version=version")
    name = address.host or address.name
    if not _TABLE.fullmatch(name):
        raise AddressError(f"{url}: {name!r} is no name of a table; write for example dynamodb://pages?version=version")
    endpoint = options.get("endpoint", "")
    if endpoint and not _is_endpoint(endpoint):
        raise AddressError(f"{url}: endpoint={endpoint} is no URL; write for example endpoint=http://127.0.0.1:8000")
    service = AwsService(DYNAMODB_CODES, url, endpoint, options.get("region", ""), options.get("profile", ""))
    return DynamoTable(service, name, options.get("key", ""))


def _is_endpoint(endpoint: str) -> bool:
    try:
        parts = urlsplit(endpoint)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False
