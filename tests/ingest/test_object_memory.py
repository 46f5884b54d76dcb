"""An object is never in memory as a whole."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.generated_object import NAME, generated_object
from benchmarks.object_workload import LARGE_RECORD_BYTES

from ingest import counting_worker
from running import scaled

SIZE = 300_000_000
PEAK_MAX_BYTES = 200_000_000


def test_a_large_object_is_read_within_200_mb_of_memory(tmp_path: Path):
    records = SIZE // LARGE_RECORD_BYTES
    with generated_object(records * LARGE_RECORD_BYTES) as endpoint:
        store = f"s3://generated?endpoint={endpoint}&anonymous=true"
        command = [sys.executable, counting_worker.__file__, store, NAME, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, timeout=scaled(60), check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    found = json.loads(done.stdout)
    assert found["records"] == records
    assert found["peak_bytes"] < PEAK_MAX_BYTES
