import logging

import pytest

from trivet.process.imports import NOISY_LOGGERS, quiet_noisy_loggers


@pytest.mark.parametrize(("root", "expected"), [("INFO", logging.WARNING), ("ERROR", logging.ERROR)])
def test_a_noisy_library_warns_and_says_no_more(root: str, expected: int) -> None:
    before = {name: logging.getLogger(name).level for name in (None, *NOISY_LOGGERS)}
    try:
        logging.getLogger().setLevel(root)
        quiet_noisy_loggers()
        assert {logging.getLogger(name).level for name in NOISY_LOGGERS} == {expected}
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
