"""Installs, fetches and builds the servers that the tests need, and says so: `make servers`."""

import os
import shutil
import sys
import time

from servers import dynamodb, elasticmq, fakegcs, machine, opensearch, pubsub, seaweedfs, shared
from servers.machine import MissingPackageError, MissingServerError, Report

BUILDS = {
    "opensearch": opensearch.build,
    "elasticmq": elasticmq.build,
    "dynamodb": dynamodb.build,
    "seaweedfs": seaweedfs.build,
    "pubsub": pubsub.build,
    "fakegcs": fakegcs.build,
}
"""The servers that are no Debian package by themselves."""
APT_GET = ("apt-get", "--quiet", "-o", "DPkg::Lock::Timeout=600")


def main(servers: list[str]) -> int:
    missing = [server for server in servers or shared.NEEDED if shared.why_missing(server)]
    packages = Packages()
    failed = [server for server in missing if not _provide(server, packages)]
    if packages.refused:
        _say(f"as root, run: apt-get install --no-install-recommends {' '.join(sorted(packages.refused))}")
    if failed:
        _say(f"still missing: {', '.join(failed)}")
        return 1
    _say(f"all {len(servers or shared.NEEDED)} servers are there, in {machine.CACHE} or as Debian packages")
    return 0


class Packages:
    """Debian packages, each of which is tried once."""

    def __init__(self) -> None:
        self.refused: set[str] = set()
        """Those that only root may install."""
        self._tried: set[str] = set()

    def install(self, missing: MissingPackageError, report: Report) -> None:
        """Raises MissingServerError if that is not possible."""
        packages = set(missing.packages)
        if not may_install():
            self.refused |= packages
        if not may_install() or packages <= self._tried:
            raise missing
        if not self._tried:
            # The list of a fresh machine is empty, and that of an old one names files that are gone.
            report("apt-get update")
            machine.run([*APT_GET, "update"], report)
        self._tried |= packages
        report(f"apt-get install {' '.join(missing.packages)}")
        options = ("install", "--yes", "--no-install-recommends", *missing.packages)
        machine.run([*APT_GET, *options], report, {"DEBIAN_FRONTEND": "noninteractive"})


def may_install() -> bool:
    return os.getuid() == 0 and shutil.which("apt-get") is not None


def _provide(server: str, packages: Packages) -> bool:
    """Bring one server onto this machine, and report each step; False if that failed."""
    begun = time.monotonic()

    def report(step: str) -> None:
        _say(f"{server}: {time.monotonic() - begun:.0f} s: {step}")

    try:
        while missing := _missing_packages(server, report):
            packages.install(missing, report)
    except MissingServerError as error:
        report(f"failed: {error}")
        return False
    report("ready")
    return True


def _missing_packages(server: str, report: Report) -> MissingPackageError | None:
    try:
        if server in BUILDS:
            BUILDS[server](report)
        shared.NEEDED[server]()
    except MissingPackageError as error:
        return error
    return None


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
