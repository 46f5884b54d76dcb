"""The scheduling example: however many ask at once, no car is at two patients', and each error says what to do."""

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest
from examples.scheduling import care, load, processes
from examples.scheduling.care import CareRequest, Visit
from examples.scheduling.load import Told
from examples.scheduling.report import Run

from running import scaled
from servers import machine, shared

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "scheduling"
MORNING = {"market": "Tampa", "earliest": "2026-12-01T09:00:00", "latest": "2026-12-01T10:00:00"}


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=scaled(100), check=False)


def expect_right(*arguments: str) -> None:
    done = run("main.py", "--requests", "100", "--callers", "20", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert re.search(r"^naive: overbooked in [1-6] of 6 markets and days", done.stdout, re.MULTILINE), done.stdout
    right = "keywise: overbooked in 0 of 6 markets and days, 0 requests booked twice, 0 callers told what is not so"
    assert re.search(rf"^{right}; p50 \d+ ms, p99 \d+ ms of \d+ calls$", done.stdout, re.MULTILINE), done.stdout
    assert "told 409: Tampa is fully booked on 2026-12-01; ask for another day" in done.stdout
    assert re.search(r"told 422: the window from .* spans two dates; ask for one date", done.stdout)


def posted(url: str, request: Any) -> tuple[int, Any]:
    body = request if isinstance(request, bytes) else json.dumps(request).encode()
    try:
        with urllib.request.urlopen(f"{url}/accept", body, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_a_file_is_overbooked_by_naive_desks_and_never_by_serial_ones(tmp_path: Path):
    expect_right("--folder", str(tmp_path / "a clinic"))


@pytest.mark.server("postgres")
def test_so_is_a_postgres():
    expect_right("--store", shared.postgres().create_database("scheduling_example"))


def test_a_desk_answers_over_http_and_bears_its_load(tmp_path: Path):
    store = f"sqlite:///{tmp_path / 'clinic.db'}"
    with processes.started_desks(1, store, "", is_naive=False) as [url]:
        assert url.startswith("http://127.0.0.1:")
        booked = (200, {"accepted": True, "car": 1, "starts": "09:00"})
        assert posted(url, {"id": "cr1", **MORNING}) == booked
        assert posted(url, {"id": "cr1", **MORNING}) == booked, "the same id has the same answer"
        status, told = posted(url, {"id": "cr2", **MORNING})
        assert (status, told["accepted"]) == (409, False)
        assert "ask for another window of that day" in told["reason"]
        for request, status, advice in (
            (b"no json", 400, "send for example"),
            ({**MORNING}, 400, "send for example"),
            ({"id": "cr1", **MORNING, "minutes": 30}, 422, "use a new id"),
            ({"id": "cr3", **MORNING, "market": "Paris"}, 422, "take one of Denver"),
            ({"id": "cr3", **MORNING, "latest": "2026-12-02T10:00:00"}, 422, "ask for one date"),
            ({"id": "cr3", **MORNING, "minutes": 90}, 422, "ask for a longer one"),
        ):
            told = posted(url, request)
            assert told[0] == status, told
            assert advice in told[1]["error"]
        loaded = run("load.py", url, "--requests", "30", "--callers", "10")
        assert loaded.returncode == 0, loaded.stdout + loaded.stderr
        assert re.search(r"answers with status 200\n(.*\n)?p50 [\d.]+ ms, p99 [\d.]+ ms", loaded.stdout)


def test_what_cannot_start_says_what_to_do(tmp_path: Path):
    nowhere = f"127.0.0.1:{machine.free_port()}"
    for arguments, advice in (
        (("load.py", f"http://{nowhere}"), "start examples/scheduling/endpoint.py"),
        (("main.py", "--store", f"postgresql://{nowhere}/clinic"), "look whether its server runs"),
        (("main.py", "--store", "redis://localhost"), "begins with sqlite:/// or postgresql://"),
        (("main.py", "--turns", "postgres-queue"), "add --servers"),
        (("main.py", "--callers", "0"), "no whole number from 1 on"),
    ):
        done = run(*arguments)
        assert done.returncode != 0
        assert advice in done.stderr
        assert "Traceback" not in done.stderr
    assert "example: .venv/bin/python examples/scheduling/main.py" in " ".join(run("main.py", "--help").stdout.split())


def test_a_request_is_judged_beside_what_was_accepted_before_and_not_beside_what_was_refused():
    first, second = (_request(id, 45) for id in ("cr1", "cr2"))
    accepted = care.place_for(first, [])
    assert accepted == Visit("cr1", "Tampa", "2026-12-01", 1, 9 * 60, 9 * 60 + 45)
    assert care.place_for(second, [accepted]) is None
    early = Visit("cr0", "Tampa", "2026-12-01", 1, 8 * 60, 9 * 60 + 20)
    assert care.place_for(first, [early]) is None
    assert care.place_for(_request("cr2", 30), [early]) == Visit("cr2", "Tampa", "2026-12-01", 1, 560, 590)


def test_a_visit_fits_exactly_between_two_others():
    taken = [Visit("a", "Tampa", "2026-12-01", 1, 500, 550), Visit("b", "Tampa", "2026-12-01", 1, 580, 620)]
    assert care.place_for(_request("c", 30), taken) == Visit("c", "Tampa", "2026-12-01", 1, 550, 580)
    assert care.place_for(_request("c", 31), taken) is None


def test_a_run_that_went_wrong_is_found_wrong():
    good = Visit("a", "Tampa", "2026-12-01", 1, 540, 570)
    yes, no = {"accepted": True, "car": 1, "starts": "09:00"}, {"accepted": False, "reason": "full"}

    def told(id: str, status: int, body: dict[str, Any]) -> Told:
        return Told({"id": id, **MORNING}, status, body, 0.01)

    assert Run("right", [good], [told("a", 200, yes), told("b", 409, no)]).is_right
    for visits, answers in (
        ([good, Visit("b", "Tampa", "2026-12-01", 1, 569, 600)], [told("a", 200, yes), told("b", 200, yes)]),
        ([good, Visit("a", "Tampa", "2026-12-01", 1, 570, 600)], [told("a", 200, yes)]),
        ([good], [told("a", 200, yes), told("b", 200, yes)]),
        ([good], [told("a", 409, no)]),
        ([good], [told("a", 200, yes), told("a", 409, no)]),
        ([good], [told("a", 200, yes), told("b", 503, {"error": "too late"})]),
        ([good], []),
    ):
        assert not Run("wrong", visits, answers).is_right
    assert load.percentile_ms([told("a", 200, yes)], 0.99) == 10


def _request(id: str, minutes: int) -> CareRequest:
    return msgspec.convert({"id": id, **MORNING, "minutes": minutes}, CareRequest)
