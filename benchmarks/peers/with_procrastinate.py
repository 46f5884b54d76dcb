"""Procrastinate: jobs with `lock=key`, so that those of one key run one after another in the order they were sent."""

import logging

from procrastinate import App, PsycopgConnector

from benchmarks import workload
from benchmarks.peers.entrance import enter
from benchmarks.peers.handler import Writer
from benchmarks.peers.place import Place

AT_ONCE = 1000


async def fill(place: Place) -> None:
    app = App(connector=PsycopgConnector(conninfo=place.postgres))
    bodies = place.bodies()
    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        for start in range(0, len(bodies), AT_ONCE):
            jobs = [
                app.configure_task("write", lock=workload.decode(body).content_id).make_new_job(body=body.decode())
                for body in bodies[start : start + AT_ONCE]
            ]
            await app.job_manager.batch_defer_jobs_async(jobs)


async def work(place: Place) -> None:
    concurrency = int(place.settings["concurrency"])
    app = App(connector=PsycopgConnector(conninfo=place.postgres, max_size=int(place.settings["pool"])))
    async with Writer(place, concurrency) as writer, app.open_async():

        async def write(body: str) -> None:
            await writer.write_body(body)

        app.task(name="write")(write)
        await app.run_worker_async(
            concurrency=concurrency, fetch_job_polling_interval=0.1, delete_jobs=place.settings["delete_jobs"]
        )


if __name__ == "__main__":
    # It warns of apps that are made in the main module; nobody imports this one.
    logging.disable(logging.WARNING)
    enter(fill, work)
