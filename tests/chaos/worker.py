"""A worker process of the tests: one pipeline on queue, ledger and table, until it is told to stop or killed."""

import asyncio
import sys
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

import keywise
from chaos import on_postgres, on_sqlite
from chaos.witness import Assignment, Witness

HANDLERS = {"sqlite": on_sqlite.Handlers, "postgres": on_postgres.Handlers}


def app_of(assignment: Assignment, witness: Witness) -> keywise.App:
    app = keywise.App(assignment.ledger, observers=[witness])
    pipeline = app.pipeline("stock", key="key", version="version", deleted={"gone": [True]}, **assignment.options)
    pipeline.source(f"{assignment.url}?visibility={assignment.visibility}")
    handlers = HANDLERS[assignment.on](assignment.url, witness)
    if assignment.way == "one transaction":
        pipeline.sink(f"{assignment.url}?table=stock")
    elif assignment.way == "transacted":
        pipeline.apply(handlers.transacted)
    else:
        pipeline.apply(getattr(handlers, assignment.way))
        pipeline.refetch(handlers.refetch)
    return app


def main() -> None:
    assignment = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Assignment)
    asyncio.run(app_of(assignment, Witness(assignment)).run())


if __name__ == "__main__":
    main()
