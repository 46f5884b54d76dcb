"""Servers that a whole run of the tests shares: each is started when it is first needed, and stopped at the end."""

import os
from contextlib import ExitStack

from servers import pgbouncer, seaweedfs
from servers.dynamodb import DynamoDbServer, dynamodb_server
from servers.dynamodb import find_home as find_dynamodb
from servers.elasticmq import ElasticMqServer, elasticmq_server
from servers.elasticmq import find_home as find_elasticmq
from servers.fakegcs import FakeGcsServer, fakegcs_server
from servers.fakegcs import find_program as find_fakegcs
from servers.faketime import find_library
from servers.http import HttpService, find_openssl, http_service
from servers.machine import MissingServerError
from servers.opensearch import TIGHT, OpenSearchServer, opensearch_server
from servers.opensearch import find_home as find_opensearch
from servers.postgres import PostgresServer, find_binaries, postgres_server
from servers.pubsub import PubSubServer, pubsub_server
from servers.pubsub import find_program as find_pubsub
from servers.rabbitmq import RabbitServer, rabbit_server
from servers.rabbitmq import find_programs as find_rabbitmq
from servers.redis import RedisServer, redis_server
from servers.redis import find_program as find_redis

REQUIRED = "KEYWISE_SERVERS_REQUIRED"
"""If this environment variable is set, tests of a missing server fail; otherwise they are reported as not run."""

NEEDED = {
    "postgres": find_binaries,
    "pgbouncer": pgbouncer.find_program,
    "faketime": find_library,
    "http": find_openssl,
    "redis": find_redis,
    "opensearch": find_opensearch,
    "rabbitmq": find_rabbitmq,
    "elasticmq": find_elasticmq,
    "dynamodb": find_dynamodb,
    "seaweedfs": seaweedfs.find_program,
    "pubsub": find_pubsub,
    "fakegcs": find_fakegcs,
}
"""Finds each of them, or raises MissingServerError; only `make servers` installs any."""

_stack = ExitStack()
_postgres: list[PostgresServer] = []
_redis: list[RedisServer] = []
_http: list[HttpService] = []
_opensearch: list[OpenSearchServer] = []
_rabbitmq: list[RabbitServer] = []
_seaweedfs: list[seaweedfs.SeaweedServer] = []
_elasticmq: list[ElasticMqServer] = []
_dynamodb: list[DynamoDbServer] = []
_pubsub: list[PubSubServer] = []
_fakegcs: list[FakeGcsServer] = []


def postgres() -> PostgresServer:
    """The shared PostgreSQL; nobody may stop it."""
    if not _postgres:
        _postgres.append(_stack.enter_context(postgres_server()))
    return _postgres[0]


def redis() -> RedisServer:
    """The shared Redis; nobody may stop it."""
    if not _redis:
        _redis.append(_stack.enter_context(redis_server()))
    return _redis[0]


def http() -> HttpService:
    """The shared HTTP service; nobody may stop it."""
    if not _http:
        _http.append(_stack.enter_context(http_service()))
    return _http[0]


def opensearch() -> OpenSearchServer:
    """The shared OpenSearch, which bears little; who restarts it waits until it is back."""
    if not _opensearch:
        _opensearch.append(_stack.enter_context(opensearch_server(**TIGHT)))
    return _opensearch[0]


def rabbitmq() -> RabbitServer:
    """The shared RabbitMQ; nobody may stop it."""
    if not _rabbitmq:
        _rabbitmq.append(_stack.enter_context(rabbit_server()))
    return _rabbitmq[0]


def seaweed() -> seaweedfs.SeaweedServer:
    """The shared SeaweedFS; nobody may stop it."""
    if not _seaweedfs:
        _seaweedfs.append(_stack.enter_context(seaweedfs.seaweedfs_server()))
    return _seaweedfs[0]


def elasticmq() -> ElasticMqServer:
    """The shared ElasticMQ; nobody may stop it."""
    if not _elasticmq:
        _elasticmq.append(_stack.enter_context(elasticmq_server()))
    return _elasticmq[0]


def dynamodb() -> DynamoDbServer:
    """The shared DynamoDB Local; nobody may stop it."""
    if not _dynamodb:
        _dynamodb.append(_stack.enter_context(dynamodb_server()))
    return _dynamodb[0]


def pubsub() -> PubSubServer:
    """The shared Pub/Sub; nobody may stop it, and who moves its clock moves it back."""
    if not _pubsub:
        _pubsub.append(_stack.enter_context(pubsub_server()))
    return _pubsub[0]


def fakegcs() -> FakeGcsServer:
    """The shared fake of Cloud Storage, which publishes to the shared Pub/Sub; nobody may stop it."""
    if not _fakegcs:
        _fakegcs.append(_stack.enter_context(fakegcs_server(pubsub().address)))
    return _fakegcs[0]


def stop_all() -> None:
    _postgres.clear()
    _redis.clear()
    _http.clear()
    _opensearch.clear()
    _rabbitmq.clear()
    _seaweedfs.clear()
    _elasticmq.clear()
    _dynamodb.clear()
    _pubsub.clear()
    _fakegcs.clear()
    _stack.close()


def why_missing(server: str) -> str | None:
    """Why a server is not on this machine; None if it is."""
    try:
        NEEDED[server]()
    except MissingServerError as error:
        return str(error)
    return None


def is_required() -> bool:
    return bool(os.environ.get(REQUIRED))
