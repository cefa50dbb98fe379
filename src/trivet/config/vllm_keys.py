"""Maps arguments of vLLM to keys of `[inference]`, for checks, older spellings, `vf-rl` and the server."""

VLLM_KEYS = {
    "model": "model.name",
    "dtype": "model.dtype",
    "max_model_len": "model.max_model_len",
    "enforce_eager": "model.enforce_eager",
    "trust_remote_code": "model.trust_remote_code",
    "enable_auto_tool_choice": "model.enable_auto_tool_choice",
    "tool_call_parser": "model.tool_call_parser",
    "reasoning_parser": "model.reasoning_parser",
    "chat_template": "model.chat_template",
    "tensor_parallel_size": "parallel.tp",
    "data_parallel_size": "parallel.dp",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "max_num_seqs": "max_num_seqs",
    "enable_lora": "enable_lora",
    "max_loras": "max_loras",
    "max_cpu_loras": "max_cpu_loras",
    "max_lora_rank": "max_lora_rank",
    "seed": "seed",
    "host": "server.host",
    "port": "server.port",
}
"""Key of `[inference]` by the vLLM argument that it replaces: name and meaning are the same, and so is the value."""

COMPUTED_VLLM_ARGUMENTS = {
    "served_model_name": "model.name",
    "kv_cache_memory_bytes": "cpu_kv_cache_gib",
    "api_key": "server.api_key",
    "enable_sleep_mode": "sleep_while_training",
    "uvicorn_log_level": "log.level",
}
"""Key of `[inference]` by the vLLM argument that the server computes from it; their values differ."""
