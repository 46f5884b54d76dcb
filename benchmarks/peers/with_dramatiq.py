"""Dramatiq on Redis: messages in no order and without a rule for keys, on processes with threads.

Worker processes are started by Dramatiq's own command line, which imports this module.
"""

import threading

import dramatiq
import psycopg
from dramatiq.brokers.redis import RedisBroker

from benchmarks import workload
from benchmarks.peers.entrance import enter
from benchmarks.peers.place import Handler, Place
from benchmarks.peers.record import Kind, Recorder, clock_ns
from benchmarks.peers.store import UPSERT

PLACE = Place.here()
STATEMENT = UPSERT.replace("$1", "%s").replace("$2", "%s").replace("$3", "%s")

broker = RedisBroker(url=PLACE.redis)
dramatiq.set_broker(broker)
recorder = Recorder(PLACE.log)
here = threading.local()


def write(body: str) -> None:
    """As the handler of all others, on a connection of the thread's own."""
    change = workload.decode(body)
    began_ns = clock_ns()
    if PLACE.handler is Handler.UPSERT:
        if not hasattr(here, "connection"):
            here.connection = psycopg.connect(PLACE.postgres, autocommit=True)
        here.connection.execute(STATEMENT, (change.content_id, change.payload_version, body), prepare=True)
    recorder.note(Kind.WROTE, change.content_id, change.payload_version, began_ns)


actor = dramatiq.actor(write)


async def fill(place: Place) -> None:
    for body in place.bodies():
        actor.send(body.decode())


if __name__ == "__main__":
    enter(fill, fill)
