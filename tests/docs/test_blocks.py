"""Every block of code in the docs does what its page says."""

from pathlib import Path

import pytest

from docs.pages import Block, Page, faults, is_like, pages
from servers import shared
from tidy.tree import expect_none


def is_run(block: Block) -> bool:
    return block.language in ("python", "console") and not block.quoted


RUNNABLE = [page for page in pages() if any(map(is_run, page.blocks()))]
ON_POSTGRES = [page for page in RUNNABLE if "DATABASE_URL" in page.text]
ON_REDIS = [page for page in RUNNABLE if "REDIS_URL" in page.text]
ON_HTTP = [page for page in RUNNABLE if "SERVICE_URL" in page.text]
ON_OPENSEARCH = [page for page in RUNNABLE if "SEARCH_HOST" in page.text]
ON_RABBITMQ = [page for page in RUNNABLE if "RABBITMQ_URL" in page.text]
SERVED = [*ON_POSTGRES, *ON_REDIS, *ON_HTTP, *ON_OPENSEARCH, *ON_RABBITMQ]
"""They need a server."""


@pytest.mark.parametrize("page", [page for page in RUNNABLE if page not in SERVED], ids=lambda page: page.path)
def test_a_page_does_what_it_says(page: Page, tmp_path: Path):
    expect_none(faults(page, tmp_path))


@pytest.mark.server("postgres")
@pytest.mark.parametrize("page", ON_POSTGRES, ids=lambda page: page.path)
def test_a_page_about_postgres_does_what_it_says(page: Page, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("DATABASE_URL", shared.postgres().create_database(f"docs_{ON_POSTGRES.index(page)}"))
    expect_none(faults(page, tmp_path))


@pytest.mark.server("redis")
@pytest.mark.parametrize("page", ON_REDIS, ids=lambda page: page.path)
def test_a_page_about_redis_does_what_it_says(page: Page, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("REDIS_URL", shared.redis().url)
    expect_none(faults(page, tmp_path))


@pytest.mark.server("http")
@pytest.mark.parametrize("page", ON_HTTP, ids=lambda page: page.path)
def test_a_page_about_http_does_what_it_says(page: Page, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("SERVICE_URL", shared.http().space().url.removesuffix("/documents/{key}"))
    expect_none(faults(page, tmp_path))


@pytest.mark.server("opensearch")
@pytest.mark.parametrize("page", ON_OPENSEARCH, ids=lambda page: page.path)
def test_a_page_about_opensearch_does_what_it_says(page: Page, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("SEARCH_HOST", f"127.0.0.1:{shared.opensearch().port}")
    expect_none(faults(page, tmp_path))


@pytest.mark.server("rabbitmq")
@pytest.mark.parametrize("page", ON_RABBITMQ, ids=lambda page: page.path)
def test_a_page_about_rabbitmq_does_what_it_says(page: Page, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("RABBITMQ_URL", shared.rabbitmq().url)
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
    return asyncio.run(_limited(coroutine, limit_s))
```

```console
$ make test   # style, types and tests
```
"""
