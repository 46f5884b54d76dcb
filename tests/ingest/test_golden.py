"""What every golden notification is read as: the object, its version, and what is skipped."""

import pytest

from ingest.golden_files import NAME, golden, golden_names
from keywise.core.errors import MalformedError
from keywise.ingest.dialects import dialect_of
from keywise.ingest.notification import ObjectEvent, Skipped, SkipReason
from keywise.ingest.versions import VersionScale

EMPTY = "d41d8cd98f00b204e9800998ecf8427e"
GCS_ETAG = "CPu1x8S+/IYDEAE="
FIRST, SECOND = 1719497684371451, 1719497690000000
"""Generations of Cloud Storage."""


def s3(
    version: int, scale: VersionScale, *, deleted: bool = False, etag: str | None = None, size: int | None = None
) -> ObjectEvent:
    return ObjectEvent(f"s3://logs/{NAME}", "logs", NAME, deleted, version, scale, etag, size)


def aws(seconds: int, fraction: int, **more: object) -> ObjectEvent:
    return s3((seconds - 0x54000000 << 32) + fraction, VersionScale.S3_SEQUENCER, **more)  # type: ignore[arg-type]


def gcs(version: int, *, deleted: bool = False, etag: str | None = GCS_ETAG, size: int | None = 12) -> ObjectEvent:
    return ObjectEvent(f"gs://logs/{NAME}", "logs", NAME, deleted, version, VersionScale.GCS_GENERATION, etag, size)


PUT = aws(0x667D73D4, 0x5F53EA22, etag=EMPTY, size=31683)
CREATED = aws(0x617F0829, 0x9329D189, etag="b1946ac92492d2347c6235b4d2611184", size=5)
NANOSECONDS = 0x17A9AB4FA93B35D8

EXPECTED = {
    "aws_put": PUT,
    "aws_multipart": aws(0x63243D68, 0x58D568F0, etag="b21ebca14f67255be1cd28c01d494508-7", size=54237908),
    "aws_delete": aws(0x667D73E6, 0x1E0A77C1, deleted=True),
    "aws_delete_marker": aws(0x667D73E6, 0x1E0A77C1, deleted=True, etag=EMPTY),
    "aws_lifecycle_expiration": aws(0x667DFD00, 0, deleted=True),
    "moto_put": s3(1719497684372000, VersionScale.EVENT_TIME, etag=EMPTY, size=31683),
    "sns_put": PUT,
    "sns_raw_delivery": PUT,
    "sns_eventbridge_created": CREATED,
    "eventbridge_created": CREATED,
    "eventbridge_deleted": aws(0x69B21FFD, 0x0745EE4E, deleted=True),
    "eventbridge_delete_marker": aws(0x617F0837, 0xB476E463, deleted=True, etag=EMPTY),
    "minio_put": s3(2 * NANOSECONDS, VersionScale.MINIO_CLOCK, etag="d8e8fca2dc0f896fd7cb4cb0031ba249", size=5),
    "minio_delete": s3(2 * NANOSECONDS + 1, VersionScale.MINIO_CLOCK, deleted=True),
    "versitygw_put": s3(0xFF, VersionScale.S3_COUNTER, etag=EMPTY, size=12),
    "versitygw_delete": s3(0x100, VersionScale.S3_COUNTER, deleted=True, size=0),
    "versitygw_list": s3(0x8E, VersionScale.S3_COUNTER, etag=EMPTY, size=12),
    "gcs_finalize": gcs(2 * FIRST),
    "gcs_finalize_without_body": gcs(2 * FIRST, etag=None, size=None),
    "gcs_overwrite": gcs(2 * SECOND),
    "gcs_delete": gcs(2 * SECOND + 1, deleted=True),
    "gcs_archive": gcs(2 * SECOND + 1, deleted=True),
}
SKIPPED = {
    "aws_test_event": SkipReason.TEST_EVENT,
    "sns_test_event": SkipReason.TEST_EVENT,
    "versitygw_test_event": SkipReason.TEST_EVENT,
    "aws_tagging": SkipReason.OTHER_EVENT,
    "eventbridge_tags_added": SkipReason.OTHER_EVENT,
    "minio_put_tagging": SkipReason.OTHER_EVENT,
    "minio_nothing_removed": SkipReason.OTHER_EVENT,
    "gcs_metadata_update": SkipReason.OTHER_EVENT,
    "gcs_overwritten": SkipReason.OVERWRITTEN,
    "gcs_archive_overwritten": SkipReason.OVERWRITTEN,
}
REFUSED = {"sns_subscription_confirmation": "confirm the subscription"}


def read(name: str) -> list[object]:
    return [*dialect_of("gcs" if name.startswith("gcs_") else "s3")(golden(name))]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_notification_is_read_as_its_object(name: str):
    assert read(name) == [EXPECTED[name]]


@pytest.mark.parametrize("name", SKIPPED)
def test_a_notification_that_changes_no_object_is_skipped(name: str):
    [found] = read(name)
    assert isinstance(found, Skipped)
    assert found.reason is SKIPPED[name]


@pytest.mark.parametrize("name", REFUSED)
def test_a_message_that_needs_an_operator_is_refused_with_what_to_do(name: str):
    with pytest.raises(MalformedError, match=REFUSED[name]):
        read(name)


def test_every_golden_file_is_expected_to_be_something():
    assert golden_names() == EXPECTED.keys() | SKIPPED.keys() | REFUSED.keys()


def test_a_deletion_of_minio_follows_the_object_whose_time_it_carries():
    put, deletion = EXPECTED["minio_put"], EXPECTED["minio_delete"]
    assert put.order < deletion.order
