"""Writes docs/configuration.md from the configuration models; with --check, fails when the page is out of date.

uv run python scripts/docs_configuration.py [--check]
"""

import argparse
import sys
from pathlib import Path

from trivet.config.loading.reference import configuration_page

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"


def main() -> int:
    """Run the program; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 when the page differs")
    page = configuration_page()
    if parser.parse_args().check:
        if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page:
            print("docs/configuration.md is out of date; run: uv run python scripts/docs_configuration.py", file=sys.stderr)
            return 1
        return 0
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
