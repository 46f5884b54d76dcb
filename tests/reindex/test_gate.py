"""The gate compares a sample of the new target with the origin."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keywise.core.entry import EMPTY
from keywise.reindex.gate import KeySample
from reindex.catalogue import Catalogue, row
from running import run

ROWS = {f"k{number}": 1 for number in range(5)}


def test_an_origin_that_returns_the_row_of_another_key_is_named(tmp_path: Path):
    """The row of the other key is not compared: at the same version, it would look like a change of the target."""
    url = f"sqlite:///{tmp_path / 'pages.db'}"
    catalogue = Catalogue(url, f"{url}?table=pages", ROWS)

    async def other_rows(keys: Sequence[str]) -> dict[str, Any]:
        return {key: row("x" if key == "k3" else key, ROWS[key]) for key in keys}

    async def story() -> str:
        async with catalogue.working():
            await catalogue.build("pages_1")
            catalogue.origin.fetch = other_rows  # type: ignore[method-assign]
            async with catalogue.acting() as admin:
                [sample] = [line for line in (await admin.verify()).failing if line.name == "sample"]
                return sample.value

    assert run(story(), limit_s=60) == "5 keys, wrong: 'k3' (failed: the origin has returned the row of 'x' for it)"


def test_every_key_has_the_same_chance_to_be_in_the_sample():
    """Choosing from many keys takes a moment, also for a large sample: no step looks at the whole of it."""
    sample = KeySample(20_000, random.Random(1))
    for number in range(200_000):
        sample.add(str(number), EMPTY)
    assert len(sample.entries) == 20_000
    for tenth in range(10):
        assert 1_800 < sum(int(key) // 20_000 == tenth for key in sample.entries) < 2_200


def test_a_sample_of_few_keys_has_all_of_them():
    sample = KeySample(20, random.Random(1))
    for key in ROWS:
        sample.add(key, EMPTY)
    assert list(sample.entries) == list(ROWS)
