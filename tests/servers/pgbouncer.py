"""A real PgBouncer for tests, in front of a PostgreSQL: on a free port of this machine, stopped by its process id."""

import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from servers import machine
from servers.postgres import USER, PostgresServer, as_user

PROGRAM = "/usr/sbin/pgbouncer"
START_S = 30.0
LOOK_S = 0.02
SETTINGS = """
[databases]
* = host=127.0.0.1 port={server_port}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
default_pool_size = 60
logfile = {folder}/log
pidfile = {folder}/pid
"""


@contextmanager
def pgbouncer(server: PostgresServer, mode: str, more: str = "") -> Iterator[str]:
    """The URL of a pooler in front of a server; it ends with the context. `more` are further lines of its settings."""
    program, port = find_program(), machine.free_port()
    folder = Path(tempfile.mkdtemp(prefix="keywise-pgbouncer-"))
    settings = folder / "settings.ini"
    # Any client is that user: only this machine can reach the port, and only while the tests run.
    text = SETTINGS.format(server_port=server.port, port=port, mode=mode, folder=folder) + more
    settings.write_text(text.replace(f"port={server.port}", f"port={server.port} user={USER}"))
    if os.getuid() == 0:
        shutil.chown(folder, USER)
    process = subprocess.Popen(
        [*as_user(), str(program), "--quiet", str(settings)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _until_it_answers(process, port)
        yield f"postgresql://{USER}@127.0.0.1:{port}/postgres"
    finally:
        process.terminate()
        process.wait(START_S)
        shutil.rmtree(folder, ignore_errors=True)


def find_program() -> Path:
    """Where it is."""
    return machine.installed("pgbouncer", lambda: Path(PROGRAM) if Path(PROGRAM).exists() else None)


def _until_it_answers(process: subprocess.Popen[bytes], port: int) -> None:
    for _ in range(int(START_S / LOOK_S)):
        with closing(socket.socket()) as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if process.poll() is not None:
            break
        threading.Event().wait(LOOK_S)
    raise RuntimeError(f"PgBouncer does not answer on port {port}; its status is {process.poll()}")
