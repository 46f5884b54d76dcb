"""The key of an object: its URI as it is, or a prefix and a hash, and never that of another object."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keywise.core.change import KEY_MAX_BYTES, check_key
from keywise.core.errors import MalformedError
from keywise.ingest.keys import object_key

NAMES = ["a b+c=1/é%2F.ndjson", "../../x", "שלום/\u202egpj.exe", "🦊" * 20, "a//b", " ", "?#%00", "line\nbreak"]


@pytest.mark.parametrize("name", NAMES)
def test_a_uri_that_fits_is_its_own_key(name: str):
    assert object_key(f"s3://b/{name}") == f"s3://b/{name}"


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=100, max_size=1024))
@example("é" * 512)
@example("🦊" * 256)
@example("x" * (KEY_MAX_BYTES - len("s3://b/")))
def test_every_key_can_be_stored_and_begins_as_its_uri(name: str):
    uri = f"s3://b/{name}"
    key = object_key(uri)
    check_key(key)
    assert key == uri or uri.startswith(key.partition("~sha256:")[0])


def test_long_uris_that_differ_at_their_end_have_different_keys():
    first, second = (object_key(f"s3://b/{'x' * 1000}{end}") for end in "ab")
    assert first != second
    assert len(first.encode()) == KEY_MAX_BYTES
    assert first.startswith("s3://b/xxx")


def test_an_object_that_is_named_like_the_key_of_another_one_does_not_share_it():
    taken = object_key(f"s3://b/{'x' * 1000}")
    assert object_key(taken) != taken
    check_key(object_key(taken))


@pytest.mark.parametrize(("uri", "cause"), [("s3://b/a\0b", "NUL"), ("s3://b/\ud800", "lone surrogate")])
def test_a_uri_that_no_ledger_stores_is_refused_however_long_it_is(uri: str, cause: str):
    for name in (uri, f"s3://b/{'x' * 600}{uri}"):
        with pytest.raises(MalformedError, match=f"{cause}.*rename the object"):
            object_key(name)
