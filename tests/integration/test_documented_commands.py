"""Run every shell block of the documentation that is marked as tested."""

import os
import subprocess
from pathlib import Path

import pytest

from support.documents import ROOT, Page, make_checkout, marked_pages

_TIME_LIMIT_S = 2400


def _parameter(page: Page) -> object:
    return pytest.param(page, id=page.name, marks=[getattr(pytest.mark, name) for name in sorted(page.markers)])


@pytest.mark.parametrize("page", [_parameter(page) for page in marked_pages()])
def test_the_commands_of_a_page_work_as_written(page: Page, tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path / "checkout")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", page.script],
        cwd=checkout,
        # A workspace that a page makes has its own project file. Its commands run in this environment all the same.
        env=os.environ | {"UV_NO_SYNC": "1", "UV_PROJECT_ENVIRONMENT": str(ROOT / ".venv")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIME_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{page.name}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
