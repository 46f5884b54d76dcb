"""A real ElasticMQ for tests, which speaks Amazon SQS: on a free port of this machine, stopped by its process id."""

import http.client
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from pathlib import Path

from servers import jars, machine
from servers.machine import Report
from servers.process import START_S, ServerProcess

NAME = "elasticmq"
MAIN = "org.elasticmq.server.Main"
SETTINGS = """
include classpath("application.conf")
node-address { protocol = http, host = 127.0.0.1, port = PORT, context-path = "" }
rest-sqs { enabled = true, bind-port = PORT, bind-hostname = "127.0.0.1", sqs-limits = strict }
rest-stats { enabled = false }
"""
# Without WRITE_DELAY=0 a crash loses messages that were confirmed half a second before it.
DURABLE = """
queues-storage { enabled = true, path = "FOLDER/queues.conf" }
messages-storage {
  enabled = true
  driver-class = "org.h2.Driver"
  uri = "jdbc:h2:FOLDER/messages;WRITE_DELAY=0"
  username = ""
  password = ""
}
"""


class ElasticMqServer:
    """One server; it can be stopped and started again on the same port, and on the same data if it is durable."""

    def __init__(
        self, home: Path, folder: Path, *, is_durable: bool, environment: Mapping[str, str] | None = None
    ) -> None:
        self.port = machine.free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._date = ""
        self._process = ServerProcess(folder, self._answers, environment)
        settings = folder / "settings.conf"
        text = SETTINGS + (DURABLE if is_durable else "")
        settings.write_text(text.replace("PORT", str(self.port)).replace("FOLDER", str(folder)))
        options = ("-Xmx256m", *jars.QUICK, f"-Dconfig.file={settings}")
        self._java = jars.JvmServer(home, self._process, [*options, "-cp", f"{home}/lib/*", MAIN])

    def start(self) -> None:
        self._java.start()

    def stop(self) -> None:
        """At once, as a crash would."""
        self._process.stop()

    def restart(self) -> None:
        """Start again after a crash. A durable server answers before it has restored its queues and messages."""
        self.stop()
        self.start()

    def keep_classes(self) -> None:
        self._java.keep_classes()

    def ask(self, action: str, **parameters: str) -> str:
        """What the server answers to an action of SQS, as XML; raises AssertionError if it refuses."""
        words = {"Action": action, "Version": "2012-11-05", **parameters}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_S)
        try:
            connection.request("GET", "/?" + "&".join(f"{name}={value}" for name, value in words.items()))
            answer = connection.getresponse()
            body = answer.read().decode()
            self._date = answer.getheader("Date", "")
            assert answer.status < 300, body
            return body
        finally:
            connection.close()

    def date(self) -> float:
        """What the server takes for the time, as its answers say; whole seconds."""
        self.ask("ListQueues")
        return parsedate_to_datetime(self._date).timestamp()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _answers(self) -> bool:
        try:
            return bool(self.ask("ListQueues"))
        except (OSError, AssertionError, http.client.HTTPException):
            return False


@contextmanager
def elasticmq_server(
    scratch: str | None = machine.IN_MEMORY,
    *,
    is_durable: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Iterator[ElasticMqServer]:
    """A new server that ends with the context."""
    home = find_home()
    with machine.scratch_folder(NAME, scratch) as folder:
        server = ElasticMqServer(home, folder, is_durable=is_durable, environment=environment)
        try:
            server.start()
            yield server
        finally:
            server.stop()


def find_home() -> Path:
    """Where its jars are."""
    return jars.find(NAME)


def build(report: Report) -> None:
    home = jars.fetch(NAME, report)
    report("starts once, to keep its classes")
    with machine.scratch_folder(NAME) as folder:
        ElasticMqServer(home, folder, is_durable=True).keep_classes()
