"""Chooses the checks over several keys of a validated configuration. They run before anything is started.

A check yields the text of each problem, in which keys are placeholders: `loading.findings.Key`. Every check is a function of
values; what looks at files is in `checks.files`.
"""

from collections.abc import Iterator

from trivet.config.checks.roles import (
    inference_problems,
    offline_problems,
    orchestrator_notices,
    orchestrator_problems,
    training_problems,
)
from trivet.config.checks.runs import run_notices, run_problems
from trivet.config.checks.sft import sft_problems
from trivet.config.loading.findings import Findings
from trivet.config.sections.base import Section
from trivet.config.sections.evaluation import EvalConfig
from trivet.config.sections.inference import InferenceConfig
from trivet.config.sections.orchestrator import OrchestratorConfig
from trivet.config.sections.rl import RLConfig
from trivet.config.sections.sft import SftConfig
from trivet.config.sections.trainer import TrainingConfig


def check(config: Section, findings: Findings) -> None:
    """Check everything that concerns more than one key of `config`."""
    for problem in _problems(config):
        findings.refuse(problem)
    for notice in _notices(config):
        findings.notice(notice)


def _problems(config: Section) -> Iterator[str]:
    if isinstance(config, RLConfig):
        yield from run_problems(config)
    elif isinstance(config, OrchestratorConfig):
        yield from orchestrator_problems(config)
    elif isinstance(config, TrainingConfig):
        yield from training_problems(config)
        if isinstance(config, SftConfig):
            yield from sft_problems(config)
    elif isinstance(config, InferenceConfig):
        yield from inference_problems(config)
    elif isinstance(config, EvalConfig):
        yield from offline_problems(config)


def _notices(config: Section) -> Iterator[str]:
    if isinstance(config, RLConfig):
        yield from run_notices(config)
    elif isinstance(config, OrchestratorConfig):
        yield from orchestrator_notices(config)
