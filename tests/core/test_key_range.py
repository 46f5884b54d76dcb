"""A table is divided into ranges of keys."""

import pytest

from keywise.core import key_range
from keywise.core.errors import AdminError
from keywise.core.key_range import shards_by_keys
from running import run


def test_a_division_into_too_many_shards_is_refused_before_the_table_is_read_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(key_range, "SHARDS_MAX", 10)
    asked = []

    async def key_after(low: str | None, size: int) -> str | None:
        asked.append(low)
        number = int(low or 0) + size
        return str(number) if number < 1000 else None

    with pytest.raises(AdminError, match=r"more than 10 shards of about 3 rows; make them larger with --shard-rows"):
        run(shards_by_keys(key_after, 3))
    assert len(asked) == 10
    assert len(run(shards_by_keys(key_after, 100))) == 10
