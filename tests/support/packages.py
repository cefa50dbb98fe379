"""Writes small packages: sources that an installer can build without a download, and metadata as an installer leaves it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

_BACKEND = """\
import base64, hashlib, tomllib, zipfile
from pathlib import Path


def _metadata():
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    requires = "".join(f"Requires-Dist: {line}\\n" for line in project["dependencies"])
    return project, f"Metadata-Version: 2.1\\nName: {project['name']}\\nVersion: {project['version']}\\n{requires}"


def _build(directory, modules):
    project, metadata = _metadata()
    stem = f"{project['name'].replace('-', '_')}-{project['version']}"
    files = dict(modules)
    files[f"{stem}.dist-info/METADATA"] = metadata
    files[f"{stem}.dist-info/WHEEL"] = "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    record = ""
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(text.encode())}\\n"
    files[f"{stem}.dist-info/RECORD"] = record + f"{stem}.dist-info/RECORD,,\\n"
    wheel = f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(Path(directory) / wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


def build_wheel(directory, config_settings=None, metadata_directory=None):
    return _build(directory, {path.name: path.read_text() for path in Path().glob("*.py") if path.name != "backend.py"})


def build_editable(directory, config_settings=None, metadata_directory=None):
    project, _ = _metadata()
    return _build(directory, {f"{project['name'].replace('-', '_')}.pth": str(Path().resolve()) + "\\n"})
"""
"""The package's own build backend. The usual ones would be fetched from an index."""


def write_source(
    folder: Path,
    name: str,
    *,
    version: str = "0.1.0",
    requires: Sequence[str] = (),
    module: str = "def load_environment(): ...",
) -> Path:
    """Write the source of a package with one module, and return its directory."""
    directory = folder / name.replace("-", "_")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "backend.py").write_text(_BACKEND)
    (directory / f"{name.replace('-', '_')}.py").write_text(f"{module}\n")
    (directory / "pyproject.toml").write_text(
        f'[project]\nname = "{name}"\nversion = "{version}"\ndependencies = {json.dumps(list(requires))}\n'
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    return directory


def write_installed(
    site: Path,
    name: str,
    version: str,
    *,
    requires: Sequence[str] = (),
    extras: Sequence[str] = (),
    modules: Mapping[str, str] | None = None,
    direct_url: Mapping[str, object] | None = None,
) -> None:
    """Write into `site` what an installer leaves: the package's metadata, and `modules` by file name."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Provides-Extra: {extra}" for extra in extras]
    lines += [f"Requires-Dist: {line}" for line in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n\nA README.\nName: not-this\n")
    files = dict(modules or {})
    for file, text in files.items():
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text(text)
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in [*files, f"{info.name}/METADATA", f"{info.name}/RECORD"]))
    (info / "INSTALLER").write_text("test\n")
    if direct_url is not None:
        (info / "direct_url.json").write_text(json.dumps(direct_url))
