"""The image is the packages of the README and its install command. Nothing here builds it: that takes a container engine."""

import re

from support.documents import ROOT
from support.scripts import SCRIPTS


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", (SCRIPTS / "Dockerfile").read_text(), flags=re.MULTILINE))
    return [(name, " ".join(words.split())) for name, _, words in (line.partition(" ") for line in text.splitlines() if line)]


def test_the_image_is_installed_by_the_script_alone():
    assert [name for name, _ in instructions()] == ["FROM", "RUN", "WORKDIR", "COPY", "ARG", "ARG", "RUN", "ENV"]
    packages, install = [words for name, words in instructions() if name == "RUN"]
    assert packages.startswith("apt-get update && apt-get install -y --no-install-recommends ")
    assert install == 'INSTALL_EXTRA="$BUILD" UV_NO_CACHE=1 bash scripts/install.sh'
    assert ("ARG", "BUILD=cpu") in instructions()
    assert instructions()[-1] == ("ENV", "PATH=/opt/trivet/.venv/bin:$PATH")


def test_the_image_has_the_packages_that_the_readme_names():
    packages = re.search(r"recommends (.*?) &&", instructions()[1][1])
    assert packages
    table = (ROOT / "README.md").read_text()
    assert all(f"`{name}`" in table for name in packages[1].split())


def test_the_base_has_a_python_that_the_project_runs_on():
    base = re.fullmatch(r"python:3\.(\d+)-slim-\w+", instructions()[0][1])
    assert base
    assert 11 <= int(base[1]) <= 13
