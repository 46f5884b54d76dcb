"""Finds the adapter of a URL: ours in a static table by scheme, those of other packages by entry points."""

import difflib
import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

from keywise.core.errors import AddressError, MissingExtraError, SettingsError
from keywise.core.url import Address, redacted

# No adapter is imported before its URL is used, because its client library may be missing.
ADAPTERS = {
    "sources": {
        "memory": "keywise.adapters.memory.source",
        "sqlite": "keywise.adapters.sqlite.source",
        "postgresql": "keywise.adapters.postgres.source",
        "postgres": "keywise.adapters.postgres.source",
        "amqp": "keywise.adapters.rabbitmq.source",
        "amqps": "keywise.adapters.rabbitmq.source",
    },
    "ledgers": {
        "memory": "keywise.adapters.memory.ledger",
        "sqlite": "keywise.adapters.sqlite.ledger.ledger",
        "postgresql": "keywise.adapters.postgres.ledger.ledger",
        "postgres": "keywise.adapters.postgres.ledger.ledger",
        "redis": "keywise.adapters.redis.ledger.ledger",
        "rediss": "keywise.adapters.redis.ledger.ledger",
    },
    "sinks": {
        "memory": "keywise.adapters.memory.sink",
        "sqlite": "keywise.adapters.sqlite.sink",
        "postgresql": "keywise.adapters.postgres.sink",
        "postgres": "keywise.adapters.postgres.sink",
        "opensearch": "keywise.adapters.opensearch.sink",
        "opensearchs": "keywise.adapters.opensearch.sink",
        "elasticsearch": "keywise.adapters.opensearch.sink",
        "elasticsearchs": "keywise.adapters.opensearch.sink",
        "http": "keywise.adapters.http.sink",
        "https": "keywise.adapters.http.sink",
    },
    "turns": {
        "memory": "keywise.adapters.memory.serial",
        "sqlite": "keywise.adapters.sqlite.serial.backend",
        "postgresql": "keywise.adapters.postgres.serial.lock_backend",
        "postgres": "keywise.adapters.postgres.serial.lock_backend",
        "postgres-lock": "keywise.adapters.postgres.serial.lock_backend",
        "postgres-queue": "keywise.adapters.postgres.serial.queue_backend",
        "redis": "keywise.adapters.redis.serial.backend",
        "rediss": "keywise.adapters.redis.serial.backend",
    },
}

# Packages of `keywise.adapters` that have a client library, by the extra that brings it.
EXTRAS = {"postgres", "redis", "rabbitmq", "opensearch", "http"}


def connect(role: str, address: Address, *arguments: Any, backend: str = "") -> Any:
    """Make the adapter for an address; it is opened later, by `async with`.

    `backend` names one of several adapters for the address, in place of its scheme.
    """
    try:
        return _finder(role, address, backend or address.scheme)(address, *arguments)
    except SettingsError as error:
        if (message := address.discreet(str(error))) == str(error):
            raise
        raise type(error)(message) from None


def schemes(role: str) -> dict[str, str]:
    """All schemes of a role, with the module that serves each."""
    points = importlib.metadata.entry_points(group=f"keywise.{role}")
    return ADAPTERS[role] | {point.name: point.value for point in points}


def _finder(role: str, address: Address, name: str) -> Callable[..., Any]:
    known = schemes(role)
    module = known.get(name)
    if module is None:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}://?" if near else f"known are: {', '.join(sorted(known))}"
        raise AddressError(f"no {role[:-1]} understands {name}:// in {redacted(address.url)}; {hint}")
    return load(module)


def load(module: str) -> Callable[..., Any]:
    """Import a plug and return its `connect`; a library that it lacks is named with the extra that brings it."""
    try:
        plug = importlib.import_module(module)
    except ModuleNotFoundError as error:
        extra = next((word for word in module.split(".") if word in EXTRAS), module.rpartition(".")[2])
        raise MissingExtraError(
            f"{module} needs {error.name}, which is not installed; run: pip install 'keywise[{extra}]'"
        ) from error
    connect: Callable[..., Any] = plug.connect
    return connect
