"""Makes what an orchestrator is connected to: environment workers, inference servers, a teacher and the trainer.

Used by `orchestrator.start`, which closes what it gets, and by the role's entry.
"""

import logging
import os
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from trivet.client.inference_client import InferenceClient
from trivet.client.server_pool import ServerPool
from trivet.config.layout import RunLayout
from trivet.config.schema.inference import ClientConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.environments.nodes.node_pools import open_node_pools
from trivet.environments.port import EnvironmentPool
from trivet.environments.settings import run_settings
from trivet.environments.workers.pool import WorkerPool, open_worker_pool
from trivet.orchestrator.teacher import Teacher
from trivet.process.proxies import direct_variables
from trivet.secret import RunSecret, find_secret
from trivet.telemetry.telemetry import Telemetry
from trivet.transport.messages import BatchSender
from trivet.transport.zeromq import ZmqSender
from trivet.weights.catalog import latest_version
from trivet.wire.batches import Batch, BatchPurpose
from trivet.wire.versions import START_VERSION

logger = logging.getLogger(__name__)


@asynccontextmanager
async def open_environments(config: OrchestratorConfig) -> AsyncGenerator[EnvironmentPool, None]:
    """Load every environment of the run in worker processes, on this node and on others; a replay has none.

    Raises:
        EnvironmentLoadError: one cannot be loaded.
        WaitTimeout: another node took too long.
    """
    if config.replay is not None:
        async with open_worker_pool([], log_of=RunLayout(config.output_dir).env_worker_log, limits=config) as pool:
            yield pool
        return
    nodes = config.env_nodes
    async with AsyncExitStack() as opened:
        local = (
            await opened.enter_async_context(open_own_workers(config)) if nodes is None or nodes.own in nodes.nodes else None
        )
        if nodes is None:
            assert local is not None
            yield local
            return
        secret = find_secret(RunLayout(config.output_dir), environ=os.environ)
        timeout_s = config.env_start_timeout_s
        yield await opened.enter_async_context(open_node_pools(local, nodes, secret=secret, timeout_s=timeout_s))


def open_own_workers(config: OrchestratorConfig, *, name_suffix: str = "") -> AbstractAsyncContextManager[WorkerPool]:
    """Load every environment of the run in worker processes of this machine.

    Args:
        name_suffix: of the names of workers and of their logs, where a run has workers on several nodes.
    """
    teacher = config.teacher_model.client.base_url if config.teacher_model is not None else []
    # Judges and tools in the workers have clients of their own, which read these variables.
    os.environ.update(direct_variables(os.environ, [*config.client.base_url, *teacher]))
    settings = list(run_settings(config).values())
    layout = RunLayout(config.output_dir)
    return open_worker_pool(
        settings, log_of=lambda env: layout.env_worker_log(f"{env}{name_suffix}"), limits=config, name_suffix=name_suffix
    )


def make_servers(config: OrchestratorConfig, telemetry: Telemetry) -> ServerPool:
    """Return the inference servers of the run, which it may change. None is asked yet."""
    client, secret = config.client, find_secret(RunLayout(config.output_dir), environ=os.environ)

    def make_client(url: str) -> InferenceClient:
        """Return a client that may change the server at `url`."""
        return inference_client(client, url, timeout_s=client.admin_timeout, secret=secret)

    return ServerPool(client, make_client=make_client, write_event=telemetry.write_event)


def make_teacher(config: OrchestratorConfig) -> Teacher | None:
    """Return the teacher of the run, None without one."""
    if config.teacher_model is None:
        return None
    client = config.teacher_model.client
    return Teacher(config.teacher_model, [inference_client(client, url) for url in client.base_url])


def inference_client(
    config: ClientConfig, url: str, *, timeout_s: float | None = None, secret: RunSecret | None = None
) -> InferenceClient:
    """Return a client for the server at `url`.

    Args:
        secret: None where the server is asked only.
    """
    return InferenceClient(
        url,
        timeout_s=timeout_s or config.timeout,
        find_token=lambda: secret.token if secret else None,
        headers=config.request_headers(url, os.environ),
    )


def make_sender(config: OrchestratorConfig) -> BatchSender:
    """Return the connection that sends batches to the trainer."""
    layout = RunLayout(config.output_dir)
    return ZmqSender(
        config.rollout_transport,
        secret=find_secret(layout, environ=os.environ),
        run=config.run,
        has_arrived=lambda batch: is_trained(batch, layout),
    )


def is_trained(batch: Batch, layout: RunLayout) -> bool:
    """Return whether a published policy shows that the trainer had `batch`.

    A trainer answers nobody before it has removed the policies that an earlier attempt left.
    """
    try:
        return batch.purpose is BatchPurpose.TRAIN and (latest_version(layout) or START_VERSION) >= batch.step
    except OSError as exc:
        logger.warning("%s cannot be read to see whether batch %s was trained: %s", layout.weights, batch.step, exc)
        return False
