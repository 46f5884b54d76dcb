"""The plainest dialect: the body of a message is the URI of an object, and nothing else."""

from keywise.core.errors import MalformedError
from keywise.ingest.notification import Announcement, ObjectEvent, checked, split_uri
from keywise.ingest.versions import VersionScale


def read_uri(body: bytes) -> list[Announcement]:
    """Read a URI. It has no version, so each object is read once within the retention, even if it is replaced.

    The URI is not decoded, as `aws s3 ls` and `gcloud storage ls` print it. One line feed at its end is dropped.
    """
    try:
        uri = body.decode()
    except UnicodeDecodeError:
        raise MalformedError(
            "the message is no UTF-8 text; send the URI of one object, as in s3://bucket/name"
        ) from None
    uri = uri.removesuffix("\n")
    _, bucket, name = split_uri(uri)
    return [checked(ObjectEvent(uri, bucket, name, False, None, VersionScale.UNVERSIONED))]
