"""A worker process of the tests: one pipeline on queue, ledger and table, until it is told to stop or killed."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

import keywise
from chaos import postgres_backend as on_postgres
from chaos import redis_backend as on_redis
from chaos import sqlite_backend as on_sqlite
from chaos.time_line import SlowHandler
from chaos.witness import Assignment, Witness


def handlers_of(assignment: Assignment, witness: Witness) -> Any:
    match assignment.on:
        case "sqlite" | "rabbitmq":
            return on_sqlite.Handlers(assignment.url, witness)
        case "postgres":
            return on_postgres.Handlers(assignment.url, witness)
    return on_redis.Handlers(assignment.url, assignment.ledger, witness)


def app_of(assignment: Assignment, witness: Witness) -> keywise.App:
    if assignment.way == "slow":
        return slow_app_of(assignment, witness)
    handlers = handlers_of(assignment, witness)
    app = keywise.App(assignment.ledger, observers=[witness, *handlers.observers])
    pipeline = app.pipeline("stock", key="key", version="version", deleted={"gone": [True]}, **assignment.options)
    pipeline.source(queue_of(assignment))
    if assignment.way == "queue_transaction":
        pipeline.sink(f"{assignment.url}?table=stock")
    elif assignment.way == "transacted":
        pipeline.apply(handlers.transacted)
    else:
        pipeline.apply(getattr(handlers, assignment.way))
        pipeline.refetch(handlers.refetch)
    return app


def slow_app_of(assignment: Assignment, witness: Witness) -> keywise.App:
    app, handler = keywise.App(assignment.ledger, observers=[witness]), SlowHandler(witness)
    pipeline = app.pipeline("stock", read=handler.read, **assignment.options)
    pipeline.source(queue_of(assignment)).apply(handler.apply)
    return app


def queue_of(assignment: Assignment) -> str:
    visibility = f"?visibility={assignment.visibility}" if assignment.visibility else ""
    return assignment.queue or assignment.url + visibility


def main() -> None:
    assignment = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Assignment)
    asyncio.run(app_of(assignment, Witness(assignment)).run())


if __name__ == "__main__":
    main()
