"""Compiles the installed packages, so that the processes of a run find their bytecode: `compile_packages.py SITE_PACKAGES`.

Called by `scripts/install.sh` after `uv sync`. Compiles only files whose bytecode is missing or older than they are, and leaves
out the packages' own tests, which no run imports. Exit code 1 when a file could not be compiled; the others are compiled all the
same.
"""

import argparse
import importlib.util
import os
import py_compile
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

_TESTS = {"test", "tests"}
_FOR_ANOTHER_PYTHON = "py312_"
"""torch has files for Python 3.12 alone, whose names begin so."""
_HEADER_BYTES = 16
"""Bytecode begins with magic number, flags, time of change and size of its source: four bytes each, little-endian."""
_FILES_PER_TASK = 100
"""About a quarter of a second of work: little enough for even progress, enough to hide the cost of a task."""


def outdated_files(root: Path) -> Iterator[str]:
    """Yield the Python files below `root` without current bytecode."""
    for directory, names, files in os.walk(root):
        names[:] = [name for name in names if name not in _TESTS and name != "__pycache__"]
        for name in files:
            path = f"{directory}/{name}"
            if name.endswith(".py") and not name.startswith(_FOR_ANOTHER_PYTHON) and not is_current(path):
                yield path


def is_current(path: str) -> bool:
    """Return whether Python would use the bytecode of the file `path` as it is."""
    source = Path(path).stat()
    expected = importlib.util.MAGIC_NUMBER + b"".join(
        (number & 0xFFFFFFFF).to_bytes(4, "little") for number in (0, int(source.st_mtime), source.st_size)
    )
    try:
        with open(importlib.util.cache_from_source(path), "rb") as file:
            return file.read(_HEADER_BYTES) == expected
    except OSError:
        return False


def compile_files(paths: Sequence[str]) -> list[str]:
    """Compile `paths` in this process and return those that could not be compiled."""
    failed: list[str] = []
    for path in paths:
        try:
            py_compile.compile(path, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP)
        except (py_compile.PyCompileError, OSError, ValueError):
            failed.append(path)
    return failed


def compile_all(paths: Sequence[str], *, interval_s: float) -> list[str]:
    """Compile `paths` in a process per core, print the progress every `interval_s`, and return the files that failed."""
    tasks = [paths[at : at + _FILES_PER_TASK] for at in range(0, len(paths), _FILES_PER_TASK)]
    failed: list[str] = []
    num_done, reported = 0, time.monotonic()
    with ProcessPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        futures = {pool.submit(compile_files, task): len(task) for task in tasks}
        for future in as_completed(futures):
            failed += future.result()
            num_done += futures[future]
            if time.monotonic() - reported >= interval_s and num_done < len(paths):
                reported = time.monotonic()
                print(f"install: compiled {num_done} of {len(paths)} files", flush=True)
    return failed


def main() -> int:
    """Run the program; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site_packages", type=Path)
    parser.add_argument("--interval-s", type=float, default=10.0, help="time between two lines of progress, seconds")
    arguments = parser.parse_args()
    paths = sorted(outdated_files(arguments.site_packages))
    print(f"install: {len(paths)} files to compile", flush=True)
    return 1 if compile_all(paths, interval_s=arguments.interval_s) else 0


if __name__ == "__main__":
    sys.exit(main())
