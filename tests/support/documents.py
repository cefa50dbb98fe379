"""Finds the shell blocks of README.md and docs/ that are marked as tested, and makes a directory to run them in.

A block is marked by the line `<!-- tested -->` above its fence; `<!-- tested: vllm -->` adds the marker of that name to its test.
The blocks of a page run one after the other, in one shell that stops at the first failure.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

_BLOCK = re.compile(r"^<!-- tested(?:: (?P<markers>[\w, ]+))? -->\n```bash\n(?P<script>.*?)^```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"^<!-- tested.*-->$", re.MULTILINE)
_WRITTEN = {"outputs", "models", "wandb", "site", "uv.lock"}
"""Results of runs, which a reader's fresh checkout does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    path: Path
    script: str
    markers: frozenset[str]

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))


def marked_pages() -> list[Page]:
    """Return the pages with marked blocks."""
    pages = (read_page(path) for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))))
    return [page for page in pages if page.script]


def read_page(path: Path) -> Page:
    text = path.read_text()
    blocks = list(_BLOCK.finditer(text))
    assert len(blocks) == len(_MARK.findall(text)), f"{path}: a mark without a bash block right below it"
    markers = frozenset(name.strip() for block in blocks for name in (block["markers"] or "").split(",") if name.strip())
    return Page(path=path, script="".join(block["script"] for block in blocks), markers=markers)


def make_checkout(directory: Path) -> Path:
    """Make a root that commands can write to without changing this one. Its entries are links to the real ones."""
    directory.mkdir()
    for entry in ROOT.iterdir():
        if entry.name not in _WRITTEN and not entry.name.startswith(".git"):
            (directory / entry.name).symlink_to(entry)
    return directory
