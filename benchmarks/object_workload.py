"""The objects that are read: the same ones every time, as files of JSON lines, and the messages that announce them."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

SMALL_RECORDS = 10
SMALL_RECORD_BYTES = 102
"""Ten of them make an object of about 1 KiB."""
LARGE_RECORD_BYTES = 200
BUCKET = "bench"
FOLDER_FILES = 1_000
CHUNK_RECORDS = 10_000


def record(number: int, size: int) -> bytes:
    """One line of JSON that has so many bytes, its newline included."""
    begin = b'{"number":%d,"text":"' % number
    return begin + b"x" * (size - len(begin) - 3) + b'"}\n'


def small_names(count: int) -> list[str]:
    return [f"{number // FOLDER_FILES:04}/{number:07}.ndjson" for number in range(count)]


def write_small(folder: Path, count: int) -> list[str]:
    """Write small objects, and return their names."""
    names = small_names(count)
    for parent in {(folder / name).parent for name in names}:
        parent.mkdir(parents=True)
    for number, name in enumerate(names):
        (folder / name).write_bytes(small_content(number))
    return names


def small_content(number: int) -> bytes:
    first = number * SMALL_RECORDS
    return b"".join(record(one, SMALL_RECORD_BYTES) for one in range(first, first + SMALL_RECORDS))


def write_large(folder: Path, count: int, records: int) -> list[str]:
    """Write objects of so many records each, and return their names."""
    folder.mkdir(parents=True)
    names = [f"large-{number}.ndjson" for number in range(count)]
    for name in names:
        with (folder / name).open("wb") as file:
            for numbers in _chunks(records):
                file.write(b"".join(record(one, LARGE_RECORD_BYTES) for one in numbers))
    return names


def s3_notification(name: str, number: int) -> bytes:
    """What Amazon S3 sends when an object is written."""
    content = {
        "s3SchemaVersion": "1.0",
        "configurationId": "bench",
        "bucket": {"name": BUCKET, "ownerIdentity": {"principalId": "A3"}, "arn": f"arn:aws:s3:::{BUCKET}"},
        "object": {
            "key": name,
            "size": SMALL_RECORDS * SMALL_RECORD_BYTES,
            "eTag": "d41d8cd98f00b204e9800998ecf8427e",
            "sequencer": f"00{0x65000000_00000000 + number:016X}",
        },
    }
    event = {
        "eventVersion": "2.1",
        "eventSource": "aws:s3",
        "awsRegion": "us-east-1",
        "eventTime": "2026-11-18T12:00:00.000Z",
        "eventName": "ObjectCreated:Put",
        "userIdentity": {"principalId": "A3"},
        "requestParameters": {"sourceIPAddress": "127.0.0.1"},
        "responseElements": {"x-amz-request-id": "C3D13FE58DE4C810", "x-amz-id-2": "FMyUVURIY8/IgAtTv8xRjskZQpcIZ9KG"},
        "s3": content,
    }
    return msgspec.json.encode({"Records": [event]})


def _chunks(records: int) -> Iterator[range]:
    for start in range(0, records, CHUNK_RECORDS):
        yield range(start, min(start + CHUNK_RECORDS, records))
