"""Adds the reference pages of the configuration to the site while mkdocs builds it. mkdocs.yml names this file as a hook.

The pages exist in the site only, one for each command: reference/rl.md and so on.
"""

from typing import TYPE_CHECKING

from trivet.config.reference import EXAMPLES, NEEDED, list_sections
from trivet.config.schema.base import Section
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.vf_rl import VfRLConfig

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

REMARKS: dict[type[Section], str] = {
    RLConfig: "`uv run trainer`, `uv run orchestrator` and `uv run inference` start one role alone. They take the keys of its"
    " sections without the first part: `trainer.optim.lr` is `optim.lr`.",
    SftConfig: "Shares model, optimizer, schedule and checkpoints with the trainer.",
    EvalConfig: "Measures the start weights and every published step on a running server.",
    VfRLConfig: "The dialect of verifiers' trainer, translated to the keys of `rl`: `--dry-run` prints the key of each value.",
}
"""The kinds of configuration that have a reference page, each with a remark."""


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Return the files of the site with the generated pages."""
    from mkdocs.structure.files import File  # imported here: tests read the pages without mkdocs

    for command, text in reference_pages().items():
        files.append(File.generated(config, f"reference/{command}.md", content=text))
    return files


def reference_pages() -> dict[str, str]:
    """Return a page with every key for each command of `REMARKS`. The roles' sections are listed once, on the page of `rl`."""
    pages: dict[str, str] = {}
    for kind, remark in REMARKS.items():
        command, example = EXAMPLES[kind]
        parts = [f"# Keys of `{command}`\n\n```\nuv run {example}\n```\n\n{remark}\n"]
        for section in list_sections(kind):
            title = f"## `{section.header}`" if section.header else "## Top level"
            lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
            for entry in section.keys:
                name, kind_of_value, default, text = (cell.replace("|", "\\|") for cell in entry)
                lines.append(f"| `{name}` | {kind_of_value} | {default if default == NEEDED else f'`{default}`'} | {text} |")
            parts.append("\n\n".join([title, *([section.text] if section.text else []), "\n".join(lines)]) + "\n")
        pages[command] = "\n".join(parts)
    return pages
