"""Each name of vLLM that trivet uses is there: where one went missing in a new release, the failure says which."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trivet.client.server_load import ServerLoad, read_load
from trivet.config.schema.inference import InferenceConfig
from trivet.errors import InferenceError
from trivet.inference import arguments, vllm_names
from trivet.inference.vllm_names import MODULE_BY_NAME

SOURCE = Path(__file__).parents[3] / "src" / "trivet"

ATTRIBUTES = {
    "AsyncEngineArgs": {"create_engine_config", "from_cli_args"},
    "AsyncLLM": {"add_lora", "collective_rpc", "engine_core", "generate", "get_supported_tasks", "model_config"}
    | {"output_handler", "output_processor", "pause_generation", "reset_prefix_cache", "resume_generation", "shutdown"}
    | {"init_weight_transfer_engine", "sleep", "vllm_config", "wake_up"},
    "ChatCompletionRequest": {"build_chat_params", "build_tok_params", "chat_template", "chat_template_kwargs"}
    | {"kv_transfer_params", "messages", "tool_choice", "tools"},
    "ChatCompletionResponse": {"choices"},
    "ChatParams": {"with_defaults"},
    "CompletionResponse": {"choices"},
    "EngineCoreOutput": {"new_token_ids", "request_id"},
    "EngineCoreRequest": {"cache_salt", "lora_request", "request_id"},
    "ErrorResponse": {"error"},
    "Executor": {"get_class"},
    "GenerateTextChoice": {"index", "token_ids"},
    "GenerateTextResponse": {"choices"},
    "GenerateTokensChoice": {"index", "token_ids"},
    "GenerateTokensResponse": {"choices"},
    "LoRARequest": {"load_inplace", "lora_int_id", "lora_name", "lora_path"},
    "LoadLoRAAdapterRequest": {"load_inplace", "lora_name", "lora_path"},
    "MultiprocExecutor": {"_init_executor", "shutdown", "start_worker_monitor"},
    "OnlineRenderer": {"chat_template", "chat_template_content_format", "default_chat_template_kwargs", "model_config"}
    | {
        "exclude_tools_when_tool_choice_none",
        "renderer",
        "trust_request_chat_template",
        "use_harmony",
        "validate_chat_template",
    },
    "OpenAIServingChat": {"create_chat_completion", "create_error_response", "online_renderer"},
    "OpenAIServingCompletion": {"create_completion"},
    "OpenAIServingModels": {"load_lora_adapter"},
    "ServingTokens": {"serve_tokens"},
    "UniProcExecutor": {"_init_executor"},
    "UsageContext": {"OPENAI_API_SERVER"},
    "VocabParallelEmbedding": {"quant_method"},
    "WeightTransferEngine": {"device", "finish_weight_update", "init_info_cls", "init_transfer_engine", "model", "model_config"}
    | {"parallel_config", "receive_weights", "shutdown", "start_weight_update", "update_info_cls"},
    "WeightTransferEngineFactory": {"register_engine"},
    "WeightTransferInitRequest": {"init_info"},
    "vllm.renderers.base.BaseRenderer": {"get_tokenizer", "render_messages_async"},
    "vllm.v1.engine.core.EngineCore": {"abort_requests"},
    "vllm.v1.engine.core_client.AsyncMPClient": {"add_request_async", "call_utility_async"},
    "vllm.v1.engine.core_client.DPLBAsyncMPClient": {"engine_inflight", "reqs_in_flight"},
    "vllm.v1.engine.output_processor.OutputProcessor": {"add_request", "process_outputs", "propagate_error", "request_states"},
    "vllm.v1.engine.output_processor.RequestState": {"queue", "request_index"},
    "vllm.v1.worker.gpu_worker.Worker": {"add_lora", "model_runner", "parallel_config", "pin_lora", "reload_weights"}
    | {
        "_weight_update_active",
        "finish_weight_update",
        "remove_lora",
        "start_weight_update",
        "update_weights",
        "weight_transfer_engine",
    },
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner": {"reset_encoder_cache", "reset_mm_cache"},
    "vllm.config.parallel.ParallelConfig": {"data_parallel_index", "rank", "world_size", "world_size_across_dp"},
    "vllm.lora.worker_manager.WorkerLoRAManager": {"add_dummy_lora"},
}
"""What is used of each class. A class that trivet meets but does not import stands here with its module."""

PROGRAM = """
import gc, importlib, inspect, json, re, sys

gc.disable()  # importing vLLM takes a quarter less time
from trivet.errors import InferenceError
from trivet.inference import vllm_names

def has(owner, name):
    # An attribute that the constructor sets is in its source alone; one of a module's functions is imported by name.
    if hasattr(owner, name) or name in getattr(owner, "model_fields", ()):
        return True
    if not inspect.isclass(owner):
        return False
    sources = "".join(inspect.getsource(each) for each in inspect.getmro(owner) if each.__module__.startswith("vllm."))
    return re.search(rf"^ +(self\\.)?{name}\\b *[:=]", sources, re.M) is not None

missing = {}
for name in vllm_names.MODULE_BY_NAME:
    try:
        getattr(vllm_names, name)
    except InferenceError as exc:
        missing[name] = str(exc)
attributes = json.load(sys.stdin)
for path, names in attributes.items():
    module, _, name = path.rpartition(".")
    try:
        owner = getattr(importlib.import_module(module) if module else vllm_names, name)
    except (ImportError, AttributeError, InferenceError) as exc:
        missing[path] = f"{path} went missing: {exc}"
        continue
    missing |= {f"{path}.{each}": f"{path} has no {each} any more" for each in names if not has(owner, each)}

import vllm.engine.arg_utils
import vllm.envs
import vllm.v1.metrics.loggers

class H100:
    # What vLLM asks of the platform for the default limits of a batch.

    def __getattr__(self, name):
        answers = {"get_device_total_memory": 80 * 2**30, "get_device_name": "NVIDIA H100 80GB HBM3"}
        return lambda: answers.get(name, False)

platform = vllm.engine.arg_utils.current_platform
vllm.engine.arg_utils.current_platform = H100()
tokens, sequences = vllm_names.AsyncEngineArgs.get_batch_defaults(1)
vllm.engine.arg_utils.current_platform = platform
limits = [values.get(vllm_names.UsageContext.OPENAI_API_SERVER) for values in (tokens, sequences)]

import asyncio
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

from vllm.v1.engine.core_client import DPLBAsyncMPClient

from trivet.inference.engine_records import RequestEngines

client = DPLBAsyncMPClient.__new__(DPLBAsyncMPClient)  # its constructor would start engines
client.__dict__ |= {"reqs_in_flight": {}, "engine_inflight": Counter(), "client_count": 1, "eng_start_index": 0}
client.__dict__ |= {"core_engines": [b"0", b"1"], "lb_engines": [[0, 0, 0.0], [0, 0, 0.0]]}
request = SimpleNamespace(request_id="a", data_parallel_rank=None, pooling_params=None)
end = lambda: asyncio.run(DPLBAsyncMPClient.process_engine_outputs(client, SimpleNamespace(finished_requests={"a"})))
routes = RequestEngines.install(client)
seen = []
client.get_core_engine_for_request(request)
routes.expect_end_of(["a"])
for act in (lambda: client.get_core_engine_for_request(request), end, end):
    act()
    seen.append([len(client.reqs_in_flight), client.engine_inflight[b"0"]])

from trivet.inference.versioned_engine import VersionedEngine, _AdmittedRequest, _Attempt

class Queue:
    pass

order = []

class Core:
    async def call_utility_async(self, name, request_ids):
        order.append([name, request_ids])

    async def add_request_async(self, request):
        order.append(["add", [request.request_id]])

class Routes:
    def forget_all_but(self, request_ids):
        order.append(["forget_all_but", sorted(request_ids)])

    def expect_end_of(self, request_ids):
        order.append(["expect_end_of", list(request_ids)])

engine = VersionedEngine.__new__(VersionedEngine)  # its constructor would start engines
queue, admitted = Queue(), _AdmittedRequest()
admitted.attempts[0] = _Attempt(SimpleNamespace(request_id="a", cache_salt="0.0/own"), 0, admitted.versions, sent_at=0.0)
engine.__dict__ |= {"_admitted": {queue: admitted}, "_request_engines": Routes(), "engine_core": Core(), "_num_adapter_loads": 0}
engine.__dict__ |= {"ledger": SimpleNamespace(num_switches=1), "output_processor": SimpleNamespace(request_states={"a": None})}
asyncio.run(engine._restart_requests_without_tokens())

import torch
from vllm.config.model import _get_head_dtype
from vllm.v1.worker import gpu_worker

from trivet.inference import worker_extension

class Engine:
    # One worker's engine for weight transfer. Its model has never memory to convert weights.
    reset_weight_update_target = start_weight_update = lambda self: None
    update_weights = lambda self, info: None

    def finish_weight_update(self):
        raise MemoryError

class Worker(worker_extension.PolicyWorkerExtension, gpu_worker.Worker):
    pass

gpu_worker.set_current_vllm_config = lambda config: nullcontext()
worker = Worker.__new__(Worker)  # its constructor would load a model
runner = SimpleNamespace(get_model=lambda: torch.nn.Module())
worker.__dict__ |= {"model_runner": runner, "vllm_config": None, "weight_transfer_engine": Engine()}
worker.__dict__ |= {"_weight_update_active": False, "_weight_update_is_draft": False}
failures = []
for _ in range(2):
    try:
        worker.load_policy("", True)
    except Exception as exc:
        failures.append(type(exc).__name__)

from trivet.inference.arguments import dtype_overrides

overridden = SimpleNamespace(**dtype_overrides("bfloat16", is_cpu=False))
head_dtype = str(_get_head_dtype(overridden, torch.bfloat16, "generate"))

parser = vllm_names.make_arg_parser(vllm_names.FlexibleArgumentParser())
arguments = [action.dest for action in parser._actions]
variables = list(vllm.envs.environment_variables)
metrics = re.findall(r'"vllm:(\\w+)"', inspect.getsource(vllm.v1.metrics.loggers))
print(json.dumps({"missing": missing, "arguments": arguments, "variables": variables, "metrics": metrics, "limits": limits}
    | {"routes": seen, "head_dtype": head_dtype, "restart": order, "failures": failures}))
"""


@pytest.fixture(scope="module")
def found() -> dict:
    """Look into the installed vLLM with a fresh interpreter, because importing vLLM changes the process."""
    given = json.dumps({name: sorted(attributes) for name, attributes in ATTRIBUTES.items()})
    program = [sys.executable, "-c", PROGRAM]
    answer = subprocess.run(program, input=given, capture_output=True, text=True, timeout=300, check=False)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout.splitlines()[-1])


def test_a_received_policy_that_fails_to_load_lets_the_next_be_loaded(found: dict) -> None:
    assert found["failures"] == ["MemoryError", "MemoryError"], "vLLM alone would refuse the second"


def test_vllm_has_every_name_and_attribute(found: dict) -> None:
    assert found["missing"] == {}


def test_vllm_has_every_argument_that_the_server_is_started_with(found: dict) -> None:
    everything = {
        "server": {"api_key": "key"},
        "model": {
            "max_model_len": 64,
            "tool_call_parser": "hermes",
            "enable_auto_tool_choice": True,
            "chat_template": "{{ x }}",
        }
        | {"reasoning_parser": "qwen3"},
        "max_num_seqs": 2,
        "enable_lora": True,
        "deterministic": True,
        "log": {"json_logging": True},
    }
    config = InferenceConfig.model_validate(everything)
    used = set().union(*(arguments.vllm_arguments(config, is_cpu=is_cpu, run_secret="secret") for is_cpu in (True, False)))
    assert not (used | {"hf_overrides", "disable_log_stats"}) - set(found["arguments"])


def test_a_restarted_requests_end_is_expected_before_it_is_aborted(found: dict) -> None:
    """The engine's report of the end may come before its answer to the abort."""
    assert found["restart"] == [["forget_all_but", ["a"]], ["expect_end_of", ["a"]], ["abort_requests", ["a"]], ["add", ["a"]]]


def test_vllm_computes_float32_logits_where_it_is_asked_to(found: dict) -> None:
    assert found["head_dtype"] == "torch.float32"


def test_vllm_reads_every_variable_that_the_server_sets_or_the_documentation_names(found: dict) -> None:
    files = [*(SOURCE / "inference").glob("*.py"), *(SOURCE.parents[1] / "docs").glob("*.md")]
    named = set(re.findall(r"\bVLLM_[A-Z0-9_]+\b", "".join(path.read_text() for path in files)))
    assert named > {"VLLM_HOST_IP", "VLLM_USE_V2_MODEL_RUNNER"}  # the latter is the fallback in troubleshooting.md
    assert not named - {"VLLM_KEYS", "COMPUTED_VLLM_ARGUMENTS"} - set(found["variables"])


def test_vllm_publishes_the_metrics_that_tell_the_load(found: dict) -> None:
    # Prometheus' client adds `_total` to the name of a counter.
    published = {*found["metrics"], *(f"{name}_total" for name in found["metrics"])}
    text = "".join(f'vllm:{name}{{engine="0"}} 3.0\n' for name in published)
    assert read_load(text) == ServerLoad(num_running=3, num_waiting=3, num_preemptions=3, kv_usage=3.0)


def test_vllm_gives_the_server_the_batch_limits_of_a_large_gpu(found: dict) -> None:
    """Without the usage, an H100 would get those of any device: 2,048 tokens and 128 sequences."""
    assert found["limits"] == [8192, 1024]


def test_vllms_client_keeps_a_restarted_request_until_it_ends(found: dict) -> None:
    """The entries and the engine's count after the request was sent again, the first attempt's end, and the second's."""
    assert found["routes"] == [[1, 1], [1, 1], [0, 0]]


def imports_of_vllm(path: Path) -> Iterator[tuple[str, str]]:
    """Yield module and name of everything that `path` imports from vLLM, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "vllm")


def test_no_other_module_imports_vllm() -> None:
    named = [
        path for path in sorted(SOURCE.rglob("*.py")) if "import vllm" in (text := path.read_text()) or "from vllm" in text
    ]
    assert [path.name for path in named if any(imports_of_vllm(path))] == ["vllm_names.py"]


def test_the_names_are_imported_when_they_are_asked_for() -> None:
    program = "import sys, trivet.inference.vllm_names; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def test_a_name_that_the_installed_vllm_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODULE_BY_NAME, "EngineCar", "json")
    with pytest.raises(InferenceError, match=r"the installed vLLM has no json\.EngineCar, which trivet uses"):
        _ = vllm_names.EngineCar  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = vllm_names.no_such_name  # type: ignore[attr-defined]
