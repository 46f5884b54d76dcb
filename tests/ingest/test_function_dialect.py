"""A function of the user as a dialect: it returns Put, Delete or Ignore, and its mistakes become dead letters."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from ingest.golden_files import delivery
from keywise.core.change import Delete, Delivery, Ignore, Put
from keywise.core.errors import MalformedError, SettingsError
from keywise.ingest.dialects import dialect_of
from keywise.ingest.notification import Announcement, ObjectEvent, Skipped, SkipReason, Unreadable
from keywise.ingest.versions import VersionScale

MOMENT = datetime(2026, 3, 1, tzinfo=UTC)


class Upload(msgspec.Struct):
    path: str
    number: int


def announced(
    read: Callable[..., Any], content: Any = b"{}", headers: dict[str, str] | None = None
) -> list[Announcement]:
    return dialect_of(read)(delivery(content, headers))


def test_a_function_gets_the_body_as_its_type_and_announces_several_objects():
    def uploads(found: list[Upload]) -> list[Put | Delete]:
        kinds = (Put, Delete)
        return [kinds[index](f"s3://b/{one.path}", one.number) for index, one in enumerate(found)]

    found = announced(uploads, [{"path": "x y", "number": 5}, {"path": "z", "number": 6}])
    assert found == [
        ObjectEvent("s3://b/x y", "b", "x y", False, 5, VersionScale.FUNCTION),
        ObjectEvent("s3://b/z", "b", "z", True, 6, VersionScale.FUNCTION),
    ]


def test_a_function_may_ask_for_bytes_and_the_delivery():
    def plain(body: bytes, message: Delivery) -> Put:
        assert message.headers is not None
        return Put(f"s3://{message.headers['bucket']}/{body.decode()}", MOMENT)

    [found] = announced(plain, b"no JSON", {"bucket": "b"})
    assert found == ObjectEvent(
        "s3://b/no JSON", "b", "no JSON", False, int(MOMENT.timestamp()) * 10**6, VersionScale.FUNCTION
    )


def test_an_object_without_a_version_is_unversioned():
    [found] = announced(lambda body: Put("s3://b/x"))
    assert isinstance(found, ObjectEvent) and found.scale is VersionScale.UNVERSIONED and found.version is None


@pytest.mark.parametrize("result", [Ignore("not ours"), []])
def test_a_message_may_be_ignored(result: object):
    [found] = announced(lambda body: result)
    assert isinstance(found, Skipped) and found.reason is SkipReason.BY_FUNCTION


class Unspeakable:
    def __repr__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    "result",
    [None, "s3://b/x", 5, Unspeakable(), Put("x"), Put(5, 1), Put("s3://b/x", 2**63), Put("s3://b/\0")],  # type: ignore[arg-type]
)
def test_a_wrong_result_is_a_dead_letter_and_does_not_affect_the_others(result: object):
    wrong, right = announced(lambda body: [result, Put("s3://b/x", 1)])
    assert isinstance(wrong, Unreadable) and wrong.cause
    assert isinstance(right, ObjectEvent)


def test_a_function_that_raises_refuses_the_message_and_keeps_the_error():
    def broken(body: dict[str, Any]) -> Put:
        return Put(body["missing"])

    with pytest.raises(MalformedError, match="the dialect failed: KeyError") as caught:
        announced(broken)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_body_that_is_not_of_the_type_is_refused():
    def typed(body: Upload) -> Put:
        return Put(body.path)

    with pytest.raises(MalformedError, match="body cannot be read"):
        announced(typed, b'{"path": 5}')


def test_a_type_that_raises_anything_refuses_the_message():
    class Moody(msgspec.Struct):
        x: int

        def __post_init__(self) -> None:
            raise OSError("not today")

    def typed(body: Moody) -> Put:
        return Put("s3://b/x")

    with pytest.raises(MalformedError, match="type refused it: OSError"):
        announced(typed, b'{"x": 1}')


async def later(body: bytes) -> Put:
    return Put("s3://b/x")


def curious(body: bytes, more: int) -> Put:
    return Put("s3://b/x")


@pytest.mark.parametrize(
    ("choice", "cause"),
    [
        ("azure", "one of s3, gcs, uri, or give a function"),
        (None, "one of s3, gcs, uri, or give a function"),
        (["s3"], "one of s3, gcs, uri, or give a function"),
        (later, "plain def"),
        (curious, "asks for 'more'"),
    ],
)
def test_a_choice_that_cannot_work_is_refused_before_anything_starts(choice: Any, cause: str):
    with pytest.raises(SettingsError, match=cause):
        dialect_of(choice)
