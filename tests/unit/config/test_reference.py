import pytest

from support.scripts import load_script
from trivet.config.keys import all_keys
from trivet.config.load import COMMANDS
from trivet.config.reference import EXAMPLES, help_text, list_sections
from trivet.config.schema.base import Section
from trivet.config.schema.vf_rl import VfRLConfig

script = load_script("docs_configuration")
PAGES = script.reference_pages()


@pytest.mark.parametrize("kind", script.REMARKS)
def test_the_page_of_a_command_has_every_key(kind: type[Section]) -> None:
    page = PAGES[EXAMPLES[kind][0]]
    assert all(str(path[-1]) in page for path, _ in all_keys(kind))


@pytest.mark.parametrize("kind", [*COMMANDS, VfRLConfig])
def test_every_key_is_documented(kind: type[Section]) -> None:
    undocumented = [
        f"{section.header} {row.name}"
        for section in list_sections(kind)
        for row in section.keys
        if not row.text and row.name != "type"
    ]
    assert undocumented == []


@pytest.mark.parametrize("kind", [*COMMANDS, VfRLConfig])
def test_help_names_every_key(kind: type[Section]) -> None:
    text = help_text(kind)
    assert all(str(path[-1]) in text for path, _ in all_keys(kind))


def test_bounds_and_choices_are_in_the_page() -> None:
    page = PAGES["rl"]
    assert "| `batch_size` | int, ≥ 1, ≤ 1048576 | `128` | Rollouts per step. |" in page
    assert '## `[trainer.scheduler] type = "cosine"`' in page
    assert "| `gpu_memory_utilization` | float, > 0, ≤ 1 | `0.9` |" in page


def test_a_key_without_a_default_is_said_to_be_needed() -> None:
    assert "  model                      text, needed. " in help_text(VfRLConfig)
    assert "| `url` | text | needed | " in PAGES["rl"]
    assert not any("Undefined" in page for page in PAGES.values())
