"""An object is never in memory as a whole."""

import json
import subprocess
import sys
from pathlib import Path

from ingest import counting_worker
from ingest.generated_object import generated_object
from running import scaled

RECORDS, RECORD_BYTES = 150_000, 2000
PEAK_MAX_BYTES = 200_000_000


def test_a_large_object_is_read_within_200_mb_of_memory(tmp_path: Path):
    with generated_object(RECORDS, RECORD_BYTES) as generated:
        assert generated.size > 1.4 * PEAK_MAX_BYTES
        command = [sys.executable, counting_worker.__file__, generated.url, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, timeout=scaled(60), check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    found = json.loads(done.stdout)
    assert found["records"] == RECORDS
    assert found["peak_bytes"] < PEAK_MAX_BYTES
