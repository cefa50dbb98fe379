"""A process with a secret in its environment that runs attacks in a sandbox of math-python, or as a plain child.

As a program: the attack and how it is confined come as one JSON line on standard input, `{"result": …}` or `{"refused": …}` is the
answer. It needs nothing but the standard library, so any interpreter of the machine can run it, as any user.
"""

import asyncio
import importlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "environments" / "math_python" / "math_python"


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    if asked["how"] == "unconfined":
        done = subprocess.run([sys.executable, "-I", "-c", asked["code"]], capture_output=True, text=True, check=False)
        print(json.dumps({"result": done.stdout + done.stderr}))
        return
    package = types.ModuleType("math_python")  # its own first lines import verifiers
    package.__path__ = [str(PACKAGE)]
    sys.modules["math_python"] = package
    sandbox = importlib.import_module("math_python.sandbox")
    if asked["how"] == "limited":
        found = sandbox.Sandbox(has_namespaces=False, changes_user=os.geteuid() == 0)
        sandbox._find_sandbox = lambda: (found, "no namespaces in this test")
    try:
        chosen = sandbox.choose_sandbox(require_isolation=asked["how"] == "isolated")
        result = asyncio.run(sandbox.run_python(asked["code"], limits=sandbox.Limits(**asked["limits"]), sandbox=chosen))
        print(json.dumps({"result": result}))
    except sandbox.SandboxFailed as exc:
        print(json.dumps({"refused": str(exc)}))


if __name__ == "__main__":
    main()
