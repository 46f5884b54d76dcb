"""Every block of code in the docs does what its page says."""

from collections.abc import Callable
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from docs.pages import Block, Page, faults, is_like, pages
from servers import shared
from tidy.tree import expect_none


def is_run(block: Block) -> bool:
    return block.language in ("python", "console") and not block.quoted


RUNNABLE = [page for page in pages() if any(map(is_run, page.blocks()))]
VARIABLES: dict[str, tuple[str, Callable[[Page], str]]] = {
    "DATABASE_URL": ("postgres", lambda page: shared.postgres().create_database(f"docs_{RUNNABLE.index(page)}")),
    "REDIS_URL": ("redis", lambda page: shared.redis().url),
    "SERVICE_URL": ("http", lambda page: shared.http().space().url.removesuffix("/documents/{key}")),
    "SEARCH_HOST": ("opensearch", lambda page: f"127.0.0.1:{shared.opensearch().port}"),
    "DYNAMODB_URL": ("dynamodb", lambda page: shared.dynamodb().url),
    "SQS_HOST": ("elasticmq", lambda page: f"127.0.0.1:{shared.elasticmq().port}"),
    "S3_URL": ("seaweedfs", lambda page: shared.seaweed().url),
    "PUBSUB_EMULATOR_HOST": ("pubsub", lambda page: shared.pubsub().address),
    "RABBITMQ_URL": ("rabbitmq", lambda page: shared.rabbitmq().url),
}
"""What a page may find in its environment: the server that it needs then, and what the variable says."""


def needed(page: Page) -> list[str]:
    return [name for name in VARIABLES if name in page.text]


def with_servers(page: Page) -> ParameterSet:
    marks = [pytest.mark.server(VARIABLES[name][0]) for name in needed(page)]
    return pytest.param(page, marks=marks, id=page.path)


@pytest.mark.parametrize("page", [with_servers(page) for page in RUNNABLE])
def test_a_page_does_what_it_says(page: Page, tmp_path: Path, monkeypatch):
    for name in needed(page):
        monkeypatch.setenv(name, VARIABLES[name][1](page))
    expect_none(faults(page, tmp_path))


@pytest.mark.parametrize("page", [page for page in pages() if page not in RUNNABLE], ids=lambda page: page.path)
def test_the_blocks_of_other_pages_are_only_for_reading(page: Page, tmp_path: Path):
    expect_none(faults(page, tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_there_is_something_to_run():
    assert {"README.md", "docs/tutorial.md"} <= {page.path for page in RUNNABLE}


def test_a_page_that_keeps_its_word_has_no_fault(tmp_path: Path):
    assert faults(Page("a.md", GOOD), tmp_path) == []
    assert (tmp_path / "greet.py").read_text().startswith("# greet.py\n")


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        ("hello Ada", "hello Bob", "instead of"),
        ("assert total == 3", "assert total == 4", "AssertionError"),
        ("python greet.py Ada", "python greet.py", "ended with status 1"),
        ("\nError: nobody", "\nError: somebody", "instead of"),
        ("\nError: nobody", "\nFine: nobody", "ended with status 1"),
        ("return asyncio.run", "return asyncio.ran", "does not say this any more"),
        ("make test", "make tset", "make has no target tset"),
        ("```console\n$ make", "```ruby\n$ make", "nobody knows how to run a block of ruby"),
    ],
)
def test_a_page_that_breaks_its_word_is_reported(tmp_path: Path, right: str, wrong: str, told: str):
    assert right in GOOD
    [fault] = faults(Page("a.md", GOOD.replace(right, wrong)), tmp_path)
    assert told in fault


def test_an_output_is_compared_loosely_but_compared():
    assert is_like("a   b\n\n", "a b\n")
    assert is_like("sent 3 in 0.12 s\n", "sent 3 in … s\n")
    assert is_like("first\nsecond\nthird\n", "first\n…\nthird\n")
    assert not is_like("a b\n", "")
    assert not is_like("", "a b\n")
    assert not is_like("sent 4 in 0.12 s\n", "sent 3 in … s\n")
    assert not is_like("first\nsecond\nfourth\n", "first\n…\nthird\n")


GOOD = """
Write it:

```python
# greet.py
import sys

if sys.argv[1] == "?":
    sys.exit("Error: nobody is called ?")
print("hello", sys.argv[1])
print(id(sys))
```

Run it:

```console
$ python greet.py Ada
hello Ada
…
$ export NAME=?
$ python greet.py "$NAME"
Error: nobody is called ?
```

```python
total = 1 + 2
```

```text
not for --> running
```

```python
assert total == 3
```

What it does:

```python tests/running.py
def run(coroutine: Coroutine[object, object, T], *, limit_s: float = 30) -> T:
    …
    return asyncio.run(_limited(coroutine, scaled(limit_s)))
```

```console
$ make test   # style, types and tests
```
"""
