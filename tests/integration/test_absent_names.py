"""What another node writes is seen soon on a file system that remembers absent names, as NFS does."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.node_chaos import SLOW_DIRECTORY, can_mount
from trivet.checkpoints.commit import PARTS, begin_part, commit, finish_part
from trivet.config.layout import RunLayout
from trivet.secret import make_secret
from trivet.weights.publish import publish
from trivet.weights.retention import acknowledge
from trivet.wire.versions import PolicyVersion, Step

PROGRAM = Path(__file__).parents[1] / "support" / "absent_names_program.py"
ABSENT_S = 60.0
"""How long the file system says that a name is absent once it was."""
SEEN_WITHIN_S = 10.0
STARTED_WITHIN_S = 120.0
NAMES = {"policy", "resumed policy", "evaluated policy", "commit", "reader"}


def write_all(layout: RunLayout) -> None:
    """Write what the nodes of a run write for each other."""
    publish(layout, version=PolicyVersion(1), run_id="run", write=lambda path: (path / "model").write_bytes(b"x") and None)
    for name in PARTS:
        (begin_part(layout, Step(1), name) / "state").write_bytes(b"x")
        finish_part(layout, Step(1), name)
    commit(layout, Step(1))
    acknowledge(layout, "orchestrator", PolicyVersion(1))
    make_secret(layout.secret)


@pytest.mark.skipif(not can_mount() or os.geteuid() != 0, reason="needs root, libfuse 3 and mfusepy")
def test_a_name_that_was_asked_for_too_early_is_seen_soon_after_it_is_there(tmp_path: Path) -> None:
    output_dir, delay = tmp_path / "run", tmp_path / "delay"
    output_dir.mkdir()
    mount = 'mount --make-rprivate /; "$PYTHON" "$SLOW" "$OUTPUT" "$DELAY" & server=$!'
    is_mounted = 'grep -q " $OUTPUT .* - fuse " /proc/self/mountinfo'
    wait = f"for _ in $(seq 600); do {is_mounted} && break; sleep 0.1; done; {is_mounted}"
    script = f'set -e; {mount}; {wait}; "$PYTHON" "{PROGRAM}" "$OUTPUT" {ABSENT_S - 20:g}; kill $server'
    environ = {"PYTHON": sys.executable, "SLOW": str(SLOW_DIRECTORY), "OUTPUT": str(output_dir), "DELAY": str(delay)}
    with subprocess.Popen(
        ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script],
        env=os.environ | environ | {"ABSENT_S": str(ABSENT_S)},
        stdout=subprocess.PIPE,
        text=True,
    ) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "waiting\n"
        time.sleep(1.0)  # every name has been asked for
        write_all(RunLayout(output_dir))
        written = time.time()
        seen = dict(line.rstrip("\n").split("\t") for line in waiting.stdout)
    assert seen.keys() == NAMES
    assert {name for name, at in seen.items() if float(at) - written > SEEN_WITHIN_S} == set()
