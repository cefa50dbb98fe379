"""Makes the command `eval` ours.

verifiers 0.3 installs a console script called `eval` too, and an installer that writes both leaves whichever came last.
`trivet_eval.pth` imports this module when Python starts under that name; it answers for the module that verifiers'
script would import, so both scripts run `trivet.evaluation.command`. It must stay free of imports: it runs before main.
"""

import sys
from types import ModuleType

VERIFIERS_MODULE = "verifiers.v1.cli.eval.main"


def _main() -> int | None:
    from trivet.evaluation.command import main

    return main()


stand_in = ModuleType(VERIFIERS_MODULE)
stand_in.main = _main  # type: ignore[attr-defined]  # a module object takes any attribute
sys.modules[VERIFIERS_MODULE] = stand_in
