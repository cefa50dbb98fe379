"""Adds the reference pages of the configuration to the site while mkdocs builds it. mkdocs.yml names this file as a hook.

The pages exist in the site only, one for each command: reference/rl.md and so on.
"""

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from trivet.config.reference import reference_pages


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the files of the site with the generated pages."""
    for command, text in reference_pages().items():
        files.append(File.generated(config, f"reference/{command}.md", content=text))
    return files
