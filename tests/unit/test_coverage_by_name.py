"""Every module has a unit test of its name, or a line here that says which test covers it instead."""

from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE, UNIT = ROOT / "src" / "trivet", Path(__file__).parent

ELSEWHERE = {
    # module: the test that covers it, below tests/
    "checkpoints/fork.py": "unit/checkpoints/test_resume.py",
    "checkpoints/orchestrator_part.py": "unit/orchestrator/test_checkpoint.py",
    "checkpoints/parts.py": "unit/checkpoints/test_commit.py",
    "client/server.py": "unit/client/test_server_pool.py",
    "config/*.py": "unit/config/test_load.py",
    "config/check*.py": "unit/config/test_check.py",
    "config/environment_ids.py": "unit/environments/packages/test_interpreters.py",
    "config/schema/*.py": "unit/config/test_load.py",
    "dialects/vf_tmux.py": "integration/test_vf_tmux.py",
    "dialects/*.py": "unit/dialects/test_vf_rl.py",
    "environments/apis/host.py": "unit/environments/apis/v0/test_kinds.py",  # declarations
    "environments/apis/messages.py": "unit/environments/apis/v0/test_runner.py",
    "environments/apis/v0/*.py": "unit/environments/apis/v0/test_runner.py",
    "environments/apis/v0/host.py": "unit/environments/apis/v0/test_kinds.py",
    "environments/apis/v1/*.py": "unit/environments/apis/v1/test_host.py",  # with verifiers 0.4
    "environments/local_pool.py": "unit/environments/apis/v0/test_kinds.py",
    "environments/nodes/*.py": "unit/environments/nodes/test_node_pools.py",  # both ends of one connection
    "environments/packages/import_*.py": "unit/environments/packages/test_discovery.py",
    "environments/packages/venvs.py": "unit/tools/test_environment_installer.py",
    "environments/packages/probe*.py": "integration/test_env_workers.py",  # a process of its own
    "environments/port.py": "unit/environments/workers/test_pool.py",
    "environments/sampling.py": "unit/environments/apis/test_requests.py",
    "environments/workers/main.py": "integration/test_env_workers.py",  # a process of its own
    "environments/workers/memory.py": "integration/test_hostile_workers.py",
    "environments/workers/worker_directory.py": "integration/test_hostile_workers.py",
    "environments/workers/worker_log.py": "integration/test_hostile_workers.py",
    "errors.py": "unit/orchestrator/test_start.py",  # declarations, and `first_error`
    "evaluation/results.py": "unit/evaluation/test_main.py",
    "evaluation/*.py": "unit/evaluation/test_evaluate.py",
    "evaluation/plan.py": "integration/test_eval_command.py",
    "examples/*.py": "integration/test_example_environments.py",
    "history/*.py": "unit/history/test_tampering.py",  # each breaks one kind of statement
    "inference/answers.py": "integration/test_multi_turn_tokens.py",
    "inference/continued_chats.py": "integration/test_multi_turn_tokens.py",
    "inference/*.py": "integration/test_inference_server.py",  # parts that run inside vLLM
    "launcher/commands/*.py": "integration/test_launcher_command.py",
    "launcher/commands/sft.py": "integration/test_sft_command.py",
    "launcher/nodes/lead.py": "integration/test_nodes.py",
    "launcher/nodes/messages.py": "unit/launcher/nodes/test_agent.py",  # declarations
    "launcher/host.py": "integration/test_launcher_processes.py",
    "launcher/processes.py": "integration/test_launcher_processes.py",  # real processes and signals
    "launcher/role_configs.py": "unit/launcher/test_plan.py",
    "launcher/supervision/decisions.py": "unit/launcher/supervision/test_recovery.py",  # declarations
    "process/encrypted_sockets.py": "unit/transport/test_strangers.py",
    "process/imports.py": "unit/test_quick_imports.py",
    "process/listening.py": "unit/launcher/test_ports.py",
    "orchestrator/connections.py": "unit/orchestrator/test_start.py",
    "library/evaluation.py": "integration/test_library.py",
    "library/process.py": "unit/library/test_trainers.py",
    "orchestrator/counters.py": "unit/orchestrator/test_metrics.py",
    "orchestrator/environment_node.py": "integration/test_env_nodes.py",  # a process of its own
    "orchestrator/main.py": "integration/test_core.py",
    "orchestrator/pools.py": "unit/orchestrator/test_sampler.py",
    "orchestrator/probe.py": "integration/test_probe.py",
    "orchestrator/change_event.py": "unit/orchestrator/test_dispatcher.py",
    "schedulers/preparation.py": "unit/schedulers/test_slurm.py",
    "schedulers/starts.py": "unit/schedulers/test_job.py",
    "schedulers/submit.py": "unit/schedulers/test_kubernetes.py",
    "shown_text.py": "unit/tools/test_status.py",
    "telemetry/*.py": "unit/telemetry/test_telemetry.py",
    "tools/check.py": "unit/history/test_check.py",
    "tools/claim_commands.py": "integration/test_wheel.py",  # acts when a wheel is installed
    "tools/merge.py": "unit/trainer/model/test_merge.py",
    "tools/view.py": "unit/view/test_server.py",
    "trainer/losses/*.py": "unit/trainer/test_loss_formulas.py",
    "trainer/main.py": "integration/test_core.py",
    "trainer/model/*.py": "unit/trainer/test_models.py",
    "trainer/open_session.py": "unit/trainer/test_loop.py",
    "trainer/optim/muon.py": "unit/trainer/optim/test_optimizer.py",
    "trainer/session.py": "unit/trainer/test_loop.py",
    "trainer/sft/*.py": "unit/trainer/sft/test_main.py",
    "transport/*.py": "unit/transport/test_contract.py",
    "transport/repeated.py": "unit/transport/test_strangers.py",
    "view/*.py": "unit/view/test_server.py",
    "view/status.py": "unit/tools/test_status.py",
    "weights/*.py": "unit/weights/test_publish.py",
    "wire/*.py": "unit/wire/test_codec.py",  # declarations
    "wire/events.py": "unit/history/test_replay.py",
    "wire/status.py": "unit/telemetry/test_process_report.py",
}
"""A pattern and its test. An exact name comes before a pattern."""


def modules_without_a_test() -> list[str]:
    """Return the paths below src/trivet of modules for which tests/unit has no file of their name."""
    modules = [path.relative_to(SOURCE) for path in sorted(SOURCE.rglob("*.py")) if path.name != "__init__.py"]
    return [path.as_posix() for path in modules if not (UNIT / path.parent / f"test_{path.name}").exists()]


def test_every_module_has_a_test_of_its_name_or_one_elsewhere() -> None:
    assert [name for name in modules_without_a_test() if not any(fnmatch(name, pattern) for pattern in ELSEWHERE)] == []


def test_no_line_of_the_table_is_out_of_date() -> None:
    without = modules_without_a_test()
    assert [pattern for pattern in ELSEWHERE if not any(fnmatch(name, pattern) for name in without)] == []
    assert [test for test in ELSEWHERE.values() if not (ROOT / "tests" / test).is_file()] == []
