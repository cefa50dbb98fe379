"""Makes the console scripts `eval` and `vf-setup` run trivet's commands.

verifiers 0.3 installs console scripts with these names too, and the script that was installed last remains.
`trivet_commands.pth` imports this module when Python starts under one of the names. The module replaces the modules that verifiers'
scripts import, so either script runs trivet's command. It imports nothing heavy, because it runs before every such command.
"""

import sys
from types import ModuleType


def _run_eval() -> int | None:
    from trivet.evaluation.main import main

    return main()


def _run_vf_setup() -> int | None:
    from trivet.cli.init import main

    return main()


MAIN_FUNCTIONS = {"verifiers.v1.cli.eval.main": _run_eval, "verifiers.legacy.scripts.setup": _run_vf_setup}
"""The function to run, by the module that verifiers' script imports."""

for _name, _main in MAIN_FUNCTIONS.items():
    _stand_in = ModuleType(_name)
    _stand_in.main = _main  # type: ignore[attr-defined]  # a module object takes any attribute
    sys.modules[_name] = _stand_in
