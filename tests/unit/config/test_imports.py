"""Reading a configuration imports neither torch nor vLLM."""

import subprocess
import sys

MEASURE = """
import sys, trivet.config.command
heavy = sorted({"torch", "vllm", "transformers", "numpy", "verifiers"} & sys.modules.keys())
raise SystemExit(", ".join(heavy))
"""


def test_configuration_imports_nothing_heavy() -> None:
    ran = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=False)
    assert ran.stderr.strip() == ""
