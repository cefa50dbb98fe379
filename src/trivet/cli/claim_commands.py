"""Makes the commands `eval` and `vf-setup` ours.

verifiers 0.3 installs console scripts of these names too, and an installer that writes both leaves whichever came last.
`trivet_commands.pth` imports this module when Python starts under one of the names. The module answers for those that verifiers'
scripts would import, so both scripts run our command. It must stay free of imports: it runs before main.
"""

import sys
from types import ModuleType


def _run_eval() -> int | None:
    from trivet.evaluation.main import main

    return main()


def _run_vf_setup() -> int | None:
    from trivet.cli.init import main

    return main()


MAINS = {"verifiers.v1.cli.eval.main": _run_eval, "verifiers.legacy.scripts.setup": _run_vf_setup}
"""Our function for the module that verifiers' script imports."""

for _name, _main in MAINS.items():
    _stand_in = ModuleType(_name)
    _stand_in.main = _main  # type: ignore[attr-defined]  # a module object takes any attribute
    sys.modules[_name] = _stand_in
