"""Messages of a dead worker come back when its leases expire, unless the URL of the queue says otherwise."""

import pytest

import keywise
from keywise import adapters
from keywise.core.errors import SettingsError
from keywise.core.url import Address
from running import run

URLS = ("memory://", "sqlite:///shop.db", "postgresql://shop@localhost/shop")


@pytest.mark.parametrize("url", URLS)
def test_a_queue_hides_deliveries_for_one_lease(url: str, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = adapters.connect_source(Address(url, "shop", {}))
    source.follow_lease(45.0, 600.0)
    assert source.visibility_s == 45.0


@pytest.mark.parametrize("url", URLS)
def test_a_visibility_in_the_url_goes_before_the_lease(url: str, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = adapters.connect_source(Address(f"{url}?visibility=50s", "shop", {}))
    source.follow_lease(45.0, 600.0)
    assert source.visibility_s == 50.0


def test_a_pipeline_tells_its_sources_the_lease():
    assert visibility_s("memory://", lease="45s") == 45.0
    assert visibility_s("memory://", lease="10m", runtime_max="20m") == 600.0
    with pytest.raises(SettingsError, match="lease=45 is longer than the visibility"):
        visibility_s("memory://?visibility=40s", lease="45s")


def visibility_s(url: str, **options: str) -> float | None:
    async def opened() -> float | None:
        app = keywise.App("memory://", observers=[])
        app.pipeline("shop", key="key", **options).source(url).sink("memory://?grade=plain")
        async with app, app.open("shop") as pipeline:
            return pipeline.sources[0][1].visibility_s

    return run(opened())
