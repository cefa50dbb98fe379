"""A full disk is reported as one, whichever library met it."""

import errno
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trivet.errors import DiskFull
from trivet.storage.disk import describe_full_disk, explaining_full_disk, free_bytes, require_free_space


def test_room_is_asked_for_before_anything_is_written(tmp_path: Path) -> None:
    later = tmp_path / "not" / "there" / "yet"
    require_free_space(later, 1000, what="a checkpoint")
    with pytest.raises(
        DiskFull, match=r"not enough free disk space to write checkpoint 7 in .*yet: 1048576\.00 GiB needed, [\d.]+ GiB free\."
    ):
        require_free_space(later, 2**50, what="checkpoint 7")
    assert free_bytes(later) > 0


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "/x"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError("rank 1: OSError: [Errno 27] File too large"),
    ],
)
def test_a_full_disk_is_recognised_in_any_dress(error: Exception, tmp_path: Path) -> None:
    def fail() -> None:
        try:
            raise error
        except Exception as exc:
            raise ValueError("could not save") from exc

    with (
        pytest.raises(DiskFull, match=r"not enough free disk space to write weights in .*: 1\.0 MiB needed.*ckpt\.keep_last"),
        explaining_full_disk(tmp_path, what="weights", num_bytes=2**20),
    ):
        fail()


def test_other_errors_pass_unchanged_and_an_unexpected_write_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(KeyError), explaining_full_disk(tmp_path, what="weights"):
        raise KeyError("name")
    text = describe_full_disk(OSError(errno.ENOSPC, "No space left on device", str(tmp_path)))
    assert str(tmp_path) in text
    assert "ckpt.resume_step = -1" in text


def test_the_kernels_own_refusal_is_recognised(tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk. The write itself fails, in another process."""
    program = (
        "import pathlib, sys\nfrom trivet.storage.disk import explaining_full_disk\n"
        "from trivet.storage.durable import write_atomically\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "with explaining_full_disk(path, what='state'): write_atomically(path / 'state', b'x' * 100_000)\n"
    )

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, preexec_fn=limit)
    assert done.returncode == 1
    assert f"DiskFull: not enough free disk space to write state in {tmp_path}" in done.stderr
    assert not (tmp_path / "state").exists()
