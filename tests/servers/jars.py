"""Servers that run on the Java of this machine, from jars that Maven fetches."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from servers import machine
from servers.machine import Report
from servers.process import ServerProcess

QUICK = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto", "-Xlog:disable")
"""Starts quickly, for tests; what takes longer than a few seconds is slower with it."""
CLASSES = "classes.jsa"
"""The classes of a server in the form in which the JVM uses them, which halves the time of a start.

The archive is only valid for jars that were not moved since, so it has a folder of its own in the cache, made last.
A JVM of another version ignores it.
"""


class JvmServer:
    """A server whose jars are in `home`; it can be stopped and started again with the same command."""

    def __init__(self, home: Path, process: ServerProcess, program: Sequence[str], user: Sequence[str] = ()) -> None:
        """`program` is all that follows the java command, `user` what precedes it."""
        self._home = home
        self._process = process
        self._program = program
        self._user = user

    def start(self) -> None:
        self._start(f"-XX:SharedArchiveFile={_classes_of(self._home) / CLASSES}")

    def keep_classes(self) -> None:
        """Run once, and keep the classes that were loaded."""
        machine.build_once(_classes_of(self._home), self._write_classes)

    def _write_classes(self, folder: Path) -> None:
        # A server that runs as another user can write nowhere else.
        archive = self._process.folder / CLASSES
        try:
            self._start(f"-XX:ArchiveClassesAtExit={archive}")
        finally:
            self._process.stop(gently=True)
        shutil.copyfile(archive, folder / CLASSES)

    def _start(self, classes: str) -> None:
        self._process.start([*self._user, find_java(), classes, *self._program])


def find(name: str) -> Path:
    """The folder of a server that `make servers` has fetched."""
    find_java()
    home = _home_of(name)
    machine.built(_classes_of(home))
    return home


def fetch(
    name: str,
    report: Report,
    *,
    goal: str = "copy-dependencies",
    prepare: Callable[[Path], None] = lambda lib: None,
) -> Path:
    """Fetch what the server's pom lists, as jars or unpacked, let `prepare` change that, and return the folder."""
    find_java()
    maven = machine.installed("maven", lambda: shutil.which("mvn"))

    def fill(folder: Path) -> None:
        report("fetches its jars")
        # Maven makes a folder beside the pom.
        pom = str(shutil.copy(_pom_of(name), folder / "pom.xml"))
        command = (maven, "--quiet", "--batch-mode", "--strict-checksums", "--file", pom, f"dependency:{goal}")
        machine.run([*command, "-DincludeScope=runtime", f"-DoutputDirectory={folder / 'lib'}"], report)
        prepare(folder / "lib")

    return machine.build_once(_home_of(name), fill)


def find_java() -> str:
    return machine.installed("default-jre-headless", lambda: shutil.which("java"))


def _home_of(name: str) -> Path:
    return machine.cache_of(name, _pom_of(name))


def _classes_of(home: Path) -> Path:
    return home.with_name(f"{home.name}-classes")


def _pom_of(name: str) -> Path:
    return Path(__file__).with_name(f"{name}.pom.xml")
