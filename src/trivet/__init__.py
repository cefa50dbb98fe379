"""Asynchronous reinforcement learning for language models. The names of the library are documented in docs/python.md.

Each name is imported when it is first used: `import trivet` itself imports nothing, and none of the names imports torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trivet.library.arguments import EvalArguments as EvalConfig
    from trivet.library.arguments import RLArguments as RLConfig
    from trivet.library.arguments import SFTArguments as SFTConfig
    from trivet.library.callbacks import StopRun as Stop
    from trivet.library.evaluation import evaluate
    from trivet.library.run import Run
    from trivet.library.trainers import RLTrainer, SFTTrainer

__all__ = ["EvalConfig", "RLConfig", "RLTrainer", "Run", "SFTConfig", "SFTTrainer", "Stop", "evaluate"]

_IMPORT_PATHS = {
    "EvalConfig": "trivet.library.arguments:EvalArguments",
    "RLConfig": "trivet.library.arguments:RLArguments",
    "RLTrainer": "trivet.library.trainers:RLTrainer",
    "Run": "trivet.library.run:Run",
    "SFTConfig": "trivet.library.arguments:SFTArguments",
    "SFTTrainer": "trivet.library.trainers:SFTTrainer",
    "Stop": "trivet.library.callbacks:StopRun",
    "evaluate": "trivet.library.evaluation:evaluate",
}
"""The module that defines each name of the library, and the name that it has there."""


def __getattr__(name: str) -> object:
    """Import a name of the library when it is first used."""
    if name not in _IMPORT_PATHS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; the library has {', '.join(__all__)}")
    # A missing or wrong package is named with the command that mends it. Environment workers have this module, and not that one.
    importlib.import_module("trivet.dependencies").require_dependencies()
    module, _, attribute = _IMPORT_PATHS[name].partition(":")
    value = globals()[name] = getattr(importlib.import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
