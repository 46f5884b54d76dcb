"""A folder with a TOML file and a module beside it, for tests of what is made of them."""

import sys
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest

import keywise
from keywise import App
from keywise.core.errors import SettingsError

SHOP = """
from keywise import Change, Put, Record

TITLE = "shop"


def read(doc: dict) -> Put:
    return Put(doc["id"])


async def read_later(doc: dict) -> Put: ...


async def index(change: Change[dict]) -> None: ...


def index_nothing() -> None: ...


def read_unknown(doc: "Unknown") -> Put: ...


def index_unknown(change: "Unknown") -> None: ...


async def refetch(key: str) -> None: ...


def lookup(key: str) -> None: ...


def split(content: bytes) -> list[bytes]:
    return content.split()


def announced(message: dict) -> Put: ...


async def write(records: list[Record[dict]]) -> None: ...


class Truth:
    def shards(self, size: int) -> None: ...

    def scan(self, shard, after: str, limit: int) -> None: ...

    def fetch(self, keys: list[str]) -> None: ...


TRUTH = Truth()
"""


class Folder:
    """A folder with a TOML file, and a module beside it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path / "pipeline.toml"
        (path / "toml_shop.py").write_text(SHOP)

    def load(self, text: str) -> App:
        self.file.write_text(dedent(text))
        return keywise.load(self.file)

    def error(self, text: str) -> SettingsError:
        with pytest.raises(SettingsError) as error:
            self.load(text)
        return error.value

    @property
    def shop(self) -> ModuleType:
        return sys.modules["toml_shop"]


def folder_in(path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """With variables in the environment; what is imported and set is forgotten after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for module in ("toml_shop", "toml_broken"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setenv("SHOP_DB", "/data/shop.db")
    monkeypatch.setenv("SHOP_BUCKET", "uploads")
    monkeypatch.setenv("SHOP_PASSWORD", "s3cret%2Fp%40ss")
    monkeypatch.delenv("SHOP_NOTHING", raising=False)
    return Folder(path)
