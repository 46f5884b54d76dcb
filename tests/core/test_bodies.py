"""Bodies as pydantic models: what is read, and what is said, and not said, of a body that a model refuses."""

import subprocess
import sys
from typing import Annotated, Any, Literal

import msgspec
import pydantic
import pytest

from keywise.core.bodies import decoder, encoded, is_model
from keywise.core.change import Delivery, Put
from keywise.core.errors import SettingsError
from keywise.flow.intake import FunctionRoute, MessageReader

SECRET = "hunter2"


class Author(pydantic.BaseModel):
    """A model inside of a model."""

    name: str
    born: int = 0


class Page(pydantic.BaseModel):
    """A typed body."""

    model_config = pydantic.ConfigDict(extra="forbid")

    id: str
    version: int = pydantic.Field(alias="payload_version")
    authors: list[Author] = []
    prices: dict[str, int] = {}
    before: "Page | None" = None


class Checked(pydantic.BaseModel):
    """A model with a check of its own, whose text repeats what it refuses."""

    id: str

    @pydantic.field_validator("id")
    @classmethod
    def is_short(cls, value: str) -> str:
        if value.startswith("broken"):
            raise LookupError(value)
        if len(value) > 3:
            raise ValueError(f"{value} is too long")
        return value


class Cat(pydantic.BaseModel):
    """One of two."""

    kind: Literal["cat"]


class Dog(pydantic.BaseModel):
    """The other one."""

    kind: Literal["dog"]


@pydantic.dataclasses.dataclass
class Point:
    """A dataclass of pydantic's."""

    x: Annotated[int, pydantic.Field(ge=0)]


def cause(kind: Any, body: bytes) -> str:
    with pytest.raises(msgspec.ValidationError) as error:
        decoder(kind)(body)
    assert error.value.__cause__ is None
    assert error.value.__context__ is None, "a traceback would repeat the body"
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "body", "value"),
    [
        (Page, b'{"id": "a", "payload_version": 3}', Page(id="a", payload_version=3)),
        (Page | None, b"null", None),
        (list[Author], b'[{"name": "Ada"}]', [Author(name="Ada")]),
        (dict[str, Author], b'{"first": {"name": "Ada", "born": 1815}}', {"first": Author(name="Ada", born=1815)}),
        (Cat | Dog, b'{"kind": "dog"}', Dog(kind="dog")),
        (Annotated[Cat | Dog, pydantic.Field(discriminator="kind")], b'{"kind": "cat"}', Cat(kind="cat")),
        (Point, b'{"x": 1}', Point(1)),
    ],
    ids=str,
)
def test_a_body_is_read_as_the_model(kind: Any, body: bytes, value: object):
    assert decoder(kind)(body) == value


@pytest.mark.parametrize("kind", [dict, dict[str, Any], Any, int | None, Literal["a"], list["int"], Put])
def test_what_is_no_model_is_left_to_msgspec(kind: Any):
    assert not is_model(kind)


REFUSED = {
    "a missing field": (Page, b'{"payload_version": 1}', "Page refuses id (missing)"),
    "a wrong value": (Page, b'{"id": "a", "payload_version": "hunter2"}', "Page refuses payload_version (int_parsing)"),
    "two at once": (Author, b'{"born": "hunter2"}', "Author refuses name (missing), born (int_parsing)"),
    "inside of a list": (
        Page,
        b'{"id": "a", "payload_version": 1, "authors": [{"name": "Ada"}, {"name": ["hunter2"]}]}',
        "Page refuses authors.1.name (string_type)",
    ),
    "inside of itself": (
        Page,
        b'{"id": "a", "payload_version": 1, "before": {"id": "hunter2"}}',
        "Page refuses before.payload_version (missing)",
    ),
    "the keys of a dict are input": (
        Page,
        b'{"id": "a", "payload_version": 1, "prices": {"hunter2": "x"}}',
        "Page refuses prices.… (int_parsing)",
    ),
    "so is an unknown field": (
        Page,
        b'{"id": "a", "payload_version": 1, "hunter2": 1}',
        "Page refuses … (extra_forbidden)",
    ),
    "a check of its own": (Checked, b'{"id": "hunter2"}', "Checked refuses id (value_error)"),
    "a check that fails": (Checked, b'{"id": "broken hunter2"}', "Checked refuses LookupError"),
    "an unknown tag": (
        Annotated[Cat | Dog, pydantic.Field(discriminator="kind")],
        b'{"kind": "hunter2"}',
        "refuses body (union_tag_invalid)",
    ),
    "no JSON": (Page, b"{hunter2", "Page refuses body (json_invalid)"),
    "bytes that are no text": (Page, b'{"id": "\xff hunter2"}', "Page refuses body (json_invalid)"),
    "a dataclass": (Point, b'{"x": -1}', "Point refuses x (greater_than_equal)"),
}


@pytest.mark.parametrize(("kind", "body", "told"), REFUSED.values(), ids=REFUSED.keys())
def test_a_refused_body_is_told_by_its_fields_and_never_by_its_values(kind: Any, body: bytes, told: str):
    said = cause(kind, body)
    assert said.endswith(told)
    assert SECRET not in said


def test_many_faults_are_told_in_short():
    body = msgspec.json.encode([{"name": SECRET, "born": SECRET}] * 100)
    said = cause(list[Author], body)
    assert said.startswith("list refuses 0.born (int_parsing), 1.born (int_parsing)")
    assert said.endswith("4.born (int_parsing) and 95 more")


def test_a_read_function_gets_the_model_and_a_refused_body_harms_no_neighbour():
    """Rule 17: one bad change never takes its batch with it."""

    def read(page: Page) -> Put:
        return Put(page.id, page.version)

    texts = [b'{"id": "a", "payload_version": 1}', b'{"id": "hunter2"}', b'{"id": "b", "payload_version": 2}']
    deliveries = [Delivery(number, number, body, 0.0) for number, body in enumerate(texts)]
    read_batch = MessageReader(FunctionRoute(read), body_max_bytes=1000).read(deliveries, 0, 0.0)
    assert [(one.change.key, one.change.version) for one in read_batch.tickets] == [("a", 1), ("b", 2)]
    assert read_batch.tickets[0].change.value == Page(id="a", payload_version=1)
    [bad] = read_batch.malformed
    assert bad.cause == "body cannot be read: Page refuses payload_version (missing)"


def test_a_type_that_pydantic_cannot_read_is_refused_before_anything_starts():
    class Other(msgspec.Struct):
        a: int

    with pytest.raises(SettingsError, match=r"bodies cannot be read as .*Unable to generate") as error:
        decoder(Cat | Other)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("body", "sent"),
    [
        (b"as it is", b"as it is"),
        ({"id": 1}, b'{"id":1}'),
        (Author(name="Ada"), b'{"name":"Ada","born":0}'),
        ([Cat(kind="cat")], b'[{"kind":"cat"}]'),
        (Page(id="a", payload_version=3), None),
    ],
    ids=str,
)
def test_a_model_is_sent_as_it_is_read(body: Any, sent: bytes | None):
    assert sent is None or encoded(body) == sent
    if isinstance(body, pydantic.BaseModel):
        assert decoder(type(body))(encoded(body)) == body


def test_what_nobody_can_write_is_refused():
    with pytest.raises(TypeError, match="type object is unsupported"):
        encoded(object())


def imported_by(script: str) -> bool:
    """Whether pydantic is imported by a script, in a process of its own."""
    told = subprocess.run(
        [sys.executable, "-c", f"{script}\nimport sys\nprint('pydantic' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return told.stdout == "True\n"


def test_pydantic_is_not_imported_by_those_who_do_not_use_it():
    use = "import keywise\nfrom keywise.core.bodies import decoder\ndecoder(dict)"
    assert not imported_by(use)
    assert imported_by(f"{use}\nimport pydantic")
