"""Credentials for tests of Amazon's services: local servers take any, and no test asks a metadata service for some."""

import pytest

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "local",
    "AWS_SECRET_ACCESS_KEY": "local",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "nowhere",
    "AWS_SHARED_CREDENTIALS_FILE": "nowhere",
}
UNSET = ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN")


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    for name in UNSET:
        monkeypatch.delenv(name, raising=False)
