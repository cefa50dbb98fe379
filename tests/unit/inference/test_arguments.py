import json
import logging
import logging.config
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trivet.config.schema.inference import InferenceConfig
from trivet.errors import ConfigError
from trivet.inference.arguments import dtype_overrides, position_overrides, require_known_arguments, vllm_arguments
from trivet.process.sockets import ServerShard


def make_config(**values: Any) -> InferenceConfig:
    return InferenceConfig.model_validate(values)


def test_every_key_of_the_section_reaches_vllm() -> None:
    model = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, "tool_call_parser": "pythonic"}
    same = {"gpu_memory_utilization": 0.5, "max_num_seqs": 7, "seed": 11}
    server = {"host": "0.0.0.0", "port": 9000}
    config = make_config(
        server=server,
        model={"name": "m", "enable_auto_tool_choice": True, **model},
        parallel={"tp": 2, "dp": 3},
        **same,
    )
    expected = {"model": "m", "served_model_name": ["m"], "tensor_parallel_size": 2, "data_parallel_size": 3}
    arguments = vllm_arguments(config, is_cpu=False, run_secret="secret")
    assert arguments.items() >= (server | model | same | expected).items()


@pytest.mark.parametrize(("transport", "engine"), [("files", None), ("http", None), ("gloo", "trivet"), ("nccl", "trivet")])
def test_vllm_makes_the_engine_that_receives_policies(transport: str, engine: str | None) -> None:
    arguments = vllm_arguments(make_config(weights_transport=transport), is_cpu=True, run_secret="secret")
    assert arguments.get("weight_transfer_config", {}).get("backend") == engine


def test_a_server_that_sleeps_while_the_trainer_learns_needs_a_gpu() -> None:
    config = make_config(sleep_while_training=True)
    assert vllm_arguments(config, is_cpu=False, run_secret="secret")["enable_sleep_mode"] is True
    assert vllm_arguments(make_config(), is_cpu=False, run_secret="secret")["enable_sleep_mode"] is False
    with pytest.raises(ConfigError, match="runs on the CPU; remove it"):
        vllm_arguments(config, is_cpu=True, run_secret="secret")


def test_on_the_cpu_the_cache_has_a_size_instead_of_a_share_of_memory() -> None:
    arguments = vllm_arguments(make_config(cpu_kv_cache_gib=0.5), is_cpu=True, run_secret="secret")
    assert arguments["kv_cache_memory_bytes"] == 2**29
    assert "gpu_memory_utilization" not in arguments


@pytest.mark.parametrize(("rank", "taken"), [(1, 1), (2, 8), (16, 16), (17, 32), (200, 256), (512, 512)])
def test_the_largest_rank_is_rounded_up_to_one_that_vllm_takes(rank: int, taken: int) -> None:
    arguments = vllm_arguments(
        make_config(enable_lora=True, max_loras=3, max_cpu_loras=5, max_lora_rank=rank), is_cpu=True, run_secret="secret"
    )
    assert arguments.items() >= {"enable_lora": True, "max_loras": 3, "max_cpu_loras": 5, "max_lora_rank": taken}.items()


@pytest.mark.parametrize(
    ("dtype", "is_cpu", "expected"),
    [
        ("bfloat16", False, {"head_dtype": "float32"}),
        ("bfloat16", True, {}),  # a copy of the whole weight for each token
        ("float32", False, {}),
        ("float16", False, {}),  # the trainer has no such dtype
        ("auto", False, {}),  # a teacher's own, which may be quantized
    ],
)
def test_logits_are_float32_where_the_trainers_are(dtype: str, is_cpu: bool, expected: dict[str, str]) -> None:
    assert dtype_overrides(dtype, is_cpu=is_cpu) == expected
    arguments = vllm_arguments(make_config(model={"dtype": dtype}), is_cpu=is_cpu, run_secret="secret")
    assert arguments.get("hf_overrides", {}) == expected


def test_what_the_user_overrides_in_a_model_wins() -> None:
    own = {"head_dtype": "model", "vocab_size": 7}
    config = make_config(model={"dtype": "bfloat16"}, vllm_args={"hf_overrides": own})
    assert vllm_arguments(config, is_cpu=False, run_secret="secret")["hf_overrides"] == own
    config = make_config(model={"dtype": "bfloat16"}, vllm_args={"hf_overrides": {"vocab_size": 7}})
    assert vllm_arguments(config, is_cpu=False, run_secret="secret")["hf_overrides"] == {
        "head_dtype": "float32",
        "vocab_size": 7,
    }


def test_an_argument_that_vllm_does_not_have_is_refused() -> None:
    require_known_arguments(["block_size"], known=["block_size", "seed"])
    with pytest.raises(ConfigError, match=r"inference\.vllm_args\.blok_size is not an argument"):
        require_known_arguments(["blok_size"], known=["block_size", "seed"])


def test_arguments_ledger_loader_and_entry_point_import_without_torch_or_vllm() -> None:
    modules = ("arguments", "engine_process", "engine_records", "policy_loader", "routes", "main")
    program = "import sys\n" + "".join(f"import trivet.inference.{module}\n" for module in modules)
    program += "assert not {'torch', 'vllm'} & set(sys.modules), 'heavy import'"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)


def test_with_json_logs_vllm_and_uvicorn_write_through_our_formatter(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = vllm_arguments(make_config(log={"json_logging": True}), is_cpu=True, run_secret="secret")
    assert "log_config_file" not in vllm_arguments(make_config(), is_cpu=True, run_secret="secret")
    config = json.loads(Path(arguments["log_config_file"]).read_text())
    before = {name: list(logging.getLogger(name).handlers) for name in config["loggers"]}
    try:
        logging.config.dictConfig(config)
        logging.getLogger("uvicorn.error").info("started")
        logging.getLogger("vllm.engine").info("loaded")
    finally:
        for name, handlers in before.items():
            logging.getLogger(name).handlers[:] = handlers
            logging.getLogger(name).propagate = True
            logging.getLogger(name).setLevel(logging.NOTSET)
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [(line["role"], line["message"]) for line in lines] == [("inference", "started"), ("inference", "loaded")]


def test_no_web_page_may_ask_and_a_key_is_vllms_own() -> None:
    assert vllm_arguments(make_config(), is_cpu=True, run_secret="secret")["allowed_origins"] == []
    assert "api_key" not in vllm_arguments(make_config(), is_cpu=True, run_secret="secret")
    keyed = vllm_arguments(make_config(server={"api_key": "key"}), is_cpu=True, run_secret="secret")
    assert keyed["api_key"] == ["key", "secret"]


@pytest.mark.parametrize(("index", "is_headless"), [(0, False), (1, True)])
def test_a_shard_is_started_as_vllm_starts_a_node_of_a_server(index: int, is_headless: bool) -> None:
    shard = ServerShard(index=index, num_shards=2, host="10.0.0.1", port=41000)
    arguments = vllm_arguments(make_config(parallel={"tp": 2}), is_cpu=True, run_secret="secret", shard=shard)
    expected = {
        "nnodes": 2,
        "node_rank": index,
        "master_addr": "10.0.0.1",
        "master_port": 41000,
        "headless": is_headless,
        "distributed_executor_backend": "mp",
        "tensor_parallel_size": 2,
    }
    assert arguments.items() >= expected.items()


SCALING = {"rope_type": "linear", "factor": 2.0}


def make_positions_config(directory: Path, model: dict[str, object], **values: object) -> InferenceConfig:
    (directory / "config.json").write_text(json.dumps(model))
    return InferenceConfig.model_validate({"model": {"name": str(directory), "rope_scaling": SCALING}, **values})


def test_the_models_own_base_is_kept(tmp_path: Path) -> None:
    model: dict[str, object] = {"model_type": "qwen3", "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    assert position_overrides(make_positions_config(tmp_path, model), {"vocab_size": 7}) == {
        "hf_overrides": {"vocab_size": 7, "rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}}
    }


def test_a_model_without_rotary_positions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no rotary positions that all its layers share; remove it"):
        position_overrides(make_positions_config(tmp_path, {"model_type": "gpt2"}), {})
