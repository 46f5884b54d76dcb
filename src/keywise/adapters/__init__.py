"""Finds the adapter of a URL: ours in a static table by scheme, those of other packages by entry points."""

import difflib
import importlib
import importlib.metadata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from keywise.core.entry import LedgerPolicy
from keywise.core.errors import AddressError, MissingExtraError, SettingsError
from keywise.core.ledger import PluggedLedger
from keywise.core.notifier import Notifier, QueueNotifier
from keywise.core.object_store import ObjectStore
from keywise.core.origin import Origin
from keywise.core.serial.contract import TurnPolicy, Turns
from keywise.core.sink import AtomicSink, Sink
from keywise.core.source import Source
from keywise.core.url import Address, redacted

POSTGRES = ("postgresql", "postgres")
REDIS = ("redis", "rediss")
SEARCH = ("opensearch", "opensearchs", "elasticsearch", "elasticsearchs")

# No adapter is imported before its URL is used, because its client library may be missing.
ADAPTERS = {
    "sources": {
        "memory": "keywise.adapters.memory.source",
        "sqlite": "keywise.adapters.sqlite.source",
        **dict.fromkeys(POSTGRES, "keywise.adapters.postgres.source"),
        **dict.fromkeys(("amqp", "amqps"), "keywise.adapters.rabbitmq.source"),
        "sqs": "keywise.adapters.sqs.source",
        "pubsub": "keywise.adapters.pubsub.source",
    },
    "ledgers": {
        "memory": "keywise.adapters.memory.ledger",
        "sqlite": "keywise.adapters.sqlite.ledger.ledger",
        **dict.fromkeys(POSTGRES, "keywise.adapters.postgres.ledger.ledger"),
        **dict.fromkeys(REDIS, "keywise.adapters.redis.ledger.ledger"),
    },
    "sinks": {
        "memory": "keywise.adapters.memory.sink",
        "sqlite": "keywise.adapters.sqlite.sink",
        **dict.fromkeys(POSTGRES, "keywise.adapters.postgres.sink"),
        **dict.fromkeys(SEARCH, "keywise.adapters.opensearch.sink"),
        **dict.fromkeys(("http", "https"), "keywise.adapters.http.sink"),
        "dynamodb": "keywise.adapters.dynamodb.sink",
    },
    "record_sinks": {
        "sqlite": "keywise.adapters.sqlite.record_table",
        **dict.fromkeys(POSTGRES, "keywise.adapters.postgres.record_table"),
    },
    "origins": {
        "memory": "keywise.adapters.memory.origin",
        "sqlite": "keywise.adapters.sqlite.origin",
        **dict.fromkeys(POSTGRES, "keywise.adapters.postgres.origin"),
        "dynamodb": "keywise.adapters.dynamodb.origin",
    },
    "turns": {
        "memory": "keywise.adapters.memory.serial",
        "sqlite": "keywise.adapters.sqlite.serial.backend",
        **dict.fromkeys((*POSTGRES, "postgres-lock"), "keywise.adapters.postgres.serial.lock_backend"),
        "postgres-queue": "keywise.adapters.postgres.serial.queue_backend",
        **dict.fromkeys(REDIS, "keywise.adapters.redis.serial.backend"),
    },
    "stores": dict.fromkeys(("s3", "gs", "file", "memory"), "keywise.adapters.obstore.store"),
    "notifiers": dict.fromkeys(("http", "https"), "keywise.adapters.http.notifier"),
}

# Packages of `keywise.adapters` that have a client library, with the extra that brings it.
EXTRAS = {
    name: name for name in ("postgres", "redis", "rabbitmq", "sqs", "pubsub", "opensearch", "http", "dynamodb")
} | {"obstore": "objects"}


def connect_source(address: Address) -> Source:
    """Make the source for an address; the caller opens it later, by `async with`. So do the functions below."""
    with _discreet(address):
        source: Source = _finder("sources", address, address.scheme)(address)
        return source


def connect_ledger(address: Address, policy: LedgerPolicy) -> PluggedLedger:
    with _discreet(address):
        ledger: PluggedLedger = _finder("ledgers", address, address.scheme)(address, policy)
        return ledger


def connect_sink(address: Address) -> Sink | AtomicSink:
    with _discreet(address):
        sink: Sink | AtomicSink = _finder("sinks", address, address.scheme)(address)
        return sink


def connect_record_sink(address: Address) -> Sink | AtomicSink:
    """Make the sink for records of objects. A database has a table with an object and an ordinal column for them."""
    role = "record_sinks" if address.scheme in schemes("record_sinks") else "sinks"
    with _discreet(address):
        sink: Sink | AtomicSink = _finder(role, address, address.scheme)(address)
        return sink


def connect_origin(address: Address) -> Origin:
    with _discreet(address):
        origin: Origin = _finder("origins", address, address.scheme)(address)
        return origin


def connect_turns(address: Address, owner: str, policy: TurnPolicy, *, backend: str = "") -> Turns:
    """Make the store of a serial function. `backend` names one of several for the address, in place of its scheme."""
    with _discreet(address):
        turns: Turns = _finder("turns", address, backend or address.scheme)(address, owner, policy)
        return turns


def connect_store(address: Address) -> ObjectStore:
    with _discreet(address):
        store: ObjectStore = _finder("stores", address, address.scheme)(address)
        return store


def connect_notifier(address: Address) -> Notifier:
    """Make the notifier for an address: a URL that takes requests, or a queue that has a source."""
    if address.scheme in schemes("sources"):
        return QueueNotifier(connect_source(address))
    with _discreet(address):
        connect = _finder("notifiers", address, address.scheme, also=schemes("sources"))
        notifier: Notifier = connect(address)
        return notifier


def schemes(role: str) -> dict[str, str]:
    """All schemes of a role, with the module that serves each."""
    points = importlib.metadata.entry_points(group=f"keywise.{role}")
    return ADAPTERS[role] | {point.name: point.value for point in points}


@contextmanager
def _discreet(address: Address) -> Iterator[None]:
    """Keep what came from the environment out of the message of a mistake."""
    try:
        yield
    except SettingsError as error:
        if (message := address.discreet(str(error))) == str(error):
            raise
        raise type(error)(message) from None


def _finder(role: str, address: Address, name: str, also: Iterable[str] = ()) -> Callable[..., Any]:
    """Return `connect` of the module that serves a name. `also` are names that the caller serves by itself."""
    modules = schemes(role)
    module = modules.get(name)
    if module is None:
        known = {*modules, *also}
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}://?" if near else f"known are: {', '.join(sorted(known))}"
        raise AddressError(f"no {role[:-1]} understands {name}:// in {redacted(address.url)}; {hint}")
    return load(module)


def load(module: str) -> Callable[..., Any]:
    """Import a plug and return its `connect`; a library that it lacks is named with the extra that brings it."""
    try:
        plug = importlib.import_module(module)
    except ModuleNotFoundError as error:
        extra = next((EXTRAS[word] for word in module.split(".") if word in EXTRAS), module.rpartition(".")[2])
        raise MissingExtraError(
            f"{module} needs {error.name}, which is not installed; run: pip install 'keywise[{extra}]'"
        ) from error
    connect: Callable[..., Any] = plug.connect
    return connect
