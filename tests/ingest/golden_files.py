"""The golden notifications, as the deliveries that carry them."""

import json
from pathlib import Path
from typing import Any

from keywise.core.change import Delivery

FOLDER = Path(__file__).parent / "golden"
NAME = "a b+c=1/é%2F.ndjson"


def golden_names() -> set[str]:
    return {path.stem for path in FOLDER.glob("*.json")}


def golden(name: str) -> Delivery:
    """A message in the shape that the service gives it. Pub/Sub messages have attributes beside their data."""
    content: Any = json.loads((FOLDER / f"{name}.json").read_bytes())
    if not name.startswith("gcs_"):
        return delivery(content)
    data = content["data"]
    return Delivery(1, 1, b"" if data is None else json.dumps(data).encode(), 50.0, headers=content["attributes"])


def delivery(content: Any, headers: dict[str, str] | None = None) -> Delivery:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return Delivery(1, 1, body, 50.0, headers=headers)


def aws_record(key: str, **fields: Any) -> dict[str, Any]:
    """A record of AWS; fields of the object by name, those of the record with a capital letter in their name."""
    known = {"key": key, "size": 1, "eTag": "e", "sequencer": "00667D73D45F53EA22"}
    entity = {"bucket": {"name": "logs"}, "object": known | {n: v for n, v in fields.items() if not _is_of_record(n)}}
    record = {"eventSource": "aws:s3", "eventName": "ObjectCreated:Put", "eventTime": "2024-06-27T14:14:44.372Z"}
    return record | {n: v for n, v in fields.items() if _is_of_record(n)} | {"s3": entity}


def _is_of_record(name: str) -> bool:
    return name.startswith("event")


def gcs_attributes(name: str = NAME, **fields: str) -> dict[str, str]:
    known = {"eventType": "OBJECT_FINALIZE", "bucketId": "logs", "objectId": name, "objectGeneration": "7"}
    return known | fields
