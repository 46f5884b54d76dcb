"""A real RabbitMQ for tests: in a scratch folder, on free ports of this machine, stopped by its process id."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from servers import machine

FOLDER = "/usr/lib/rabbitmq/bin"
START_S = 90
CONTROL_S = 60
LOOK_S = 0.02
SETTINGS = """
listeners.tcp.1 = 127.0.0.1:{port}
loopback_users = none
log.file.level = warning
log.console = false
disk_free_limit.absolute = 10MB
vm_memory_high_watermark.relative = 0.9
default_user = guest
default_pass = guest
"""
# The broker's own command line takes a second or two for each word, so a node of Erlang is kept for asking.
ASKING = """
    Loop = fun(Again) -> case io:get_line("") of
        eof -> halt(0);
        Line ->
            {ok, Tokens, _} = erl_scan:string(Line),
            {ok, Parsed} = erl_parse:parse_exprs(Tokens),
            Value = try erl_eval:exprs(Parsed, []) of {value, Found, _} -> {ok, Found} catch _:Why -> {failed, Why} end,
            io:format("~0tp~n", [Value]),
            Again(Again)
    end end, Loop(Loop).
"""
# A queue that has just been declared, or whose broker has just started, may have no leader for a moment.
MESSAGES = """
    Call = fun(Module, Function, Given) -> rpc:call(NODE, Module, Function, Given) end,
    Count = fun(Queue) -> case Call(amqqueue, get_type, [Queue]) of
        rabbit_quorum_queue ->
            Leader = Call(amqqueue, get_pid, [Queue]),
            Ask = fun Again(Left) -> case Call(ra, leader_query, [Leader, fun rabbit_fifo:query_messages_total/1]) of
                {ok, {_, Total}, _} -> Total;
                _ when Left > 0 -> timer:sleep(100), Again(Left - 1)
            end end,
            Ask(100);
        _ -> [{messages, Total}] = Call(rabbit_amqqueue, info, [Queue, [messages]]), Total
    end end,
    Names = fun(Queue) -> {resource, _, queue, Name} = Call(amqqueue, get_name, [Queue]), Name end,
    lists:sum([Count(Queue) || Queue <- Call(rabbit_amqqueue, list, []),
        lists:member(Names(Queue), EXACT) orelse string:prefix(Names(Queue), <<"PREFIX">>) =/= nomatch])
"""

OVERVIEW = """
    Call = fun(Module, Function, Given) -> rpc:call(NODE, Module, Function, Given) end,
    [Call(ra, leader_query, [Call(amqqueue, get_pid, [Queue]), fun rabbit_fifo:overview/1])
        || Queue <- Call(rabbit_amqqueue, list, []), Call(amqqueue, get_type, [Queue]) =:= rabbit_quorum_queue]
"""

HASTY = """[{rabbit, [
  {channel_tick_interval, 500},
  {dead_letter_worker_publisher_confirm_timeout, 5000}
]}].
"""
"""Whoever holds a message for too long is found out soon. What has expired and finds its queue away, because the broker
has just been restarted, is tried again soon too, and not after three minutes."""
DEFAULT = "[].\n"


class RabbitServer:
    """One broker; it can be stopped and started again on the same data and the same port."""

    def __init__(self, programs: Path, folder: Path, settings: str, plugins: str, advanced: str = HASTY) -> None:
        self.port, self._distribution_port, self._names_port = (machine.free_port() for _ in range(3))
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}/%2F"
        self.node = f"keywise{self.port}@localhost"
        self._programs = programs
        self._folder = folder
        self._settings = settings
        self._plugins = plugins
        self._advanced = advanced
        self._names: subprocess.Popen[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._asking: subprocess.Popen[str] | None = None
        self._cookie = secrets.token_hex(16)

    def create(self) -> None:
        (self._folder / "rabbitmq.conf").write_text(SETTINGS.format(port=self.port) + self._settings)
        (self._folder / "enabled_plugins").write_text(f"[{self._plugins}].\n")
        (self._folder / "advanced.config").write_text(self._advanced)
        cookie = self._folder / ".erlang.cookie"
        cookie.write_text(self._cookie)
        cookie.chmod(0o400)
        # Erlang would start one for the whole machine, and leave it behind.
        self._names = subprocess.Popen(
            ["epmd", "-address", "127.0.0.1", "-port", str(self._names_port)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._until_started(self._names_port, self._names)

    def start(self) -> None:
        with (self._folder / "output").open("ab") as output:
            self._process = subprocess.Popen(
                [str(self._programs / "rabbitmq-server")],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._folder,
                start_new_session=True,
            )
        self._until_started(self.port, self._process)

    def stop(self) -> None:
        """At once, as a crash would."""
        if self._process is not None:
            # The broker is a child of the script that starts it; both are in a group of their own.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
            _until(lambda: not _answers(self.port))

    def restart(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        self.stop()
        if self._asking is not None:
            self._asking.kill()
            self._asking.communicate()
        if self._names is not None:
            self._names.kill()
            self._names.wait()

    def control(self, *words: str) -> str:
        """Ask the broker's own command line."""
        command = [str(self._programs / "rabbitmqctl"), "--quiet", "--node", self.node, *words]
        done = subprocess.run(
            command,
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=CONTROL_S,
            check=False,
            cwd=self._folder,
        )
        if done.returncode != 0:
            raise RuntimeError(f"rabbitmqctl {words} failed: {done.stdout}{done.stderr}")
        return done.stdout

    def cut_connections(self) -> None:
        """As an administrator does it, with rabbitmqctl close_all_connections."""
        pids = "rpc:call(Node, rabbit_networking, connections, [])".replace("Node", f"'{self.node}'")
        self.ask(f"rpc:call('{self.node}', rabbit_networking, close_connections, [{pids}, <<\"cut by a test\">>])")

    def add_user(self, user: str, password: str) -> None:
        """One who may do everything, until it is told otherwise."""
        given = f'<<"{user}">>, <<"{password}">>, <<"tests">>'
        self.ask(f"rpc:call('{self.node}', rabbit_auth_backend_internal, add_user, [{given}])")
        self.permit(user)

    def permit(self, user: str, *, configure: str = ".*", write: str = ".*", read: str = ".*") -> None:
        given = ", ".join(f'<<"{one}">>' for one in (user, "/", configure, write, read, "tests"))
        self.ask(f"rpc:call('{self.node}', rabbit_auth_backend_internal, set_permissions, [{given}])")

    def messages(self, prefix: str = "") -> int:
        """How many messages all queues hold whose names begin so, handed-over ones included.

        What a quorum queue tells of itself is seconds old, and nothing after a restart, so its leader is asked.
        """
        return self._messages(prefix)

    def left_in(self, queue: str) -> int:
        """How many messages of a queue are ready, held, delayed, or on their way back from a delay."""
        # One that moves while the queues are asked, one after another, is met in none of them or twice; but not again.
        return max(self._messages(f"keywise.delay.{queue}.", queue) for _ in range(2))

    def overview(self) -> str:
        """What each quorum queue knows of itself, for a message about one that is never empty."""
        asked = OVERVIEW.replace("NODE", f"'{self.node}'")
        return f"{self.ask(asked.replace(chr(10), ' '))}\n{self.log}"

    def _messages(self, prefix: str, *names: str) -> int:
        exact = ", ".join(f'<<"{name}">>' for name in names)
        asked = MESSAGES.replace("NODE", f"'{self.node}'").replace("PREFIX", prefix).replace("EXACT", f"[{exact}]")
        return int(self.ask(asked.replace("\n", " ")))

    def ask(self, expression: str) -> str:
        """What an expression of Erlang gives."""
        if self._asking is None:
            name = f"asking{self.port}@localhost"
            self._asking = subprocess.Popen(
                ["erl", "-noshell", "-sname", name, "-setcookie", self._cookie, "-eval", ASKING],
                env=self._environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=self._folder,
            )
        assert self._asking.stdin is not None and self._asking.stdout is not None
        self._asking.stdin.write(f"{expression}.\n")
        self._asking.stdin.flush()
        # Other lines are of its log.
        answers = (line for line in self._asking.stdout if line.startswith(("{ok,", "{failed,")))
        told = next(answers, "it has ended").strip()
        if not told.startswith("{ok,"):
            raise RuntimeError(f"{expression} failed: {told}")
        return told.removeprefix("{ok,").removesuffix("}")

    @property
    def log(self) -> str:
        logs = [*(self._folder / "log").glob("*.log"), self._folder / "output"]
        return "".join(path.read_text(errors="replace")[-2000:] for path in logs if path.exists())

    def _environment(self) -> dict[str, str]:
        folder = str(self._folder)
        return os.environ | {
            "HOME": folder,
            "LANG": "C.UTF-8",
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_CONFIG_FILE": f"{folder}/rabbitmq",
            "RABBITMQ_ADVANCED_CONFIG_FILE": f"{folder}/advanced.config",
            "RABBITMQ_CONF_ENV_FILE": f"{folder}/none",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/enabled_plugins",
            "RABBITMQ_MNESIA_BASE": f"{folder}/data",
            "RABBITMQ_LOG_BASE": f"{folder}/log",
            "RABBITMQ_PID_FILE": f"{folder}/pid",
            "RABBITMQ_GENERATED_CONFIG_DIR": f"{folder}/generated",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none",
            "ERL_EPMD_PORT": str(self._names_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
        }

    def _until_started(self, port: int, process: subprocess.Popen[bytes]) -> None:
        def answers() -> bool:
            if process.poll() is not None:
                raise RuntimeError(f"RabbitMQ has ended: {self.log}")
            return _answers(port)

        _until(answers)


@contextmanager
def rabbit_server(
    settings: str = "", plugins: str = "", scratch: str | None = machine.IN_MEMORY, *, advanced: str = HASTY
) -> Iterator[RabbitServer]:
    """A new broker that ends with the context; `settings` are further lines of its file.

    With `advanced=DEFAULT`, it waits as long as a broker that is not run for tests.
    """
    programs = find_programs()
    folder = Path(tempfile.mkdtemp(prefix="keywise-rabbitmq-", dir=scratch))
    server = RabbitServer(programs, folder, settings, plugins, advanced)
    try:
        server.create()
        server.start()
        yield server
    finally:
        server.close()
        shutil.rmtree(folder, ignore_errors=True)


def find_programs() -> Path:
    """Where the broker's programs are."""
    return machine.installed("rabbitmq-server", _installed)


def _installed() -> Path | None:
    return Path(FOLDER) if (Path(FOLDER) / "rabbitmq-server").exists() else None


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not is_so():
        if time.monotonic() > deadline:
            raise RuntimeError(f"RabbitMQ did not start or stop within {START_S} s")
        threading.Event().wait(LOOK_S)
