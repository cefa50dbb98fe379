"""Chooses the checks over several keys of a validated configuration. They run before anything is started.

Every check is a function of values; what looks at files is in `checks.files`.
"""

from collections.abc import Iterator

from trivet.config.checks.roles import (
    inference_problems,
    name_problems,
    offline_problems,
    orchestrator_notices,
    orchestrator_problems,
    training_problems,
)
from trivet.config.checks.runs import run_notices, run_problems
from trivet.config.checks.sampling import eval_sampling_problems
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
    if isinstance(config, RLConfig):
        _extend(findings, run_problems(config), run_notices(config))
    elif isinstance(config, OrchestratorConfig):
        _extend(findings, orchestrator_problems(config), orchestrator_notices(config))
    elif isinstance(config, TrainingConfig):
        _extend(findings, training_problems(config), iter(()))
        if isinstance(config, SftConfig):
            _extend(findings, sft_problems(config), iter(()))
    elif isinstance(config, InferenceConfig):
        _extend(findings, inference_problems(config), iter(()))
    elif isinstance(config, EvalConfig):
        _extend(findings, offline_problems(config), iter(()))
        _extend(findings, name_problems(config.env, "env"), iter(()))
        _extend(findings, eval_sampling_problems(config.sampling, config.env, ""), iter(()))


def _extend(findings: Findings, problems: Iterator[str], notices: Iterator[str]) -> None:
    for problem in problems:
        findings.refuse(problem)
    for notice in notices:
        findings.notice(notice)
