"""Keeps libraries that log every request or file at INFO out of the logs of roles and environment workers."""

import logging

NOISY_LOGGERS = (
    "httpx",
    "httpx2",
    "httpcore",
    "openai",
    "urllib3",
    "filelock",
    "datasets",
    "huggingface_hub",
    "asyncio",
    "fsspec",
    "wandb",
    "aiohttp.access",
    "mcp",
    "verifiers.v1",
)


def quiet_noisy_loggers() -> None:
    """Let them log warnings and errors alone, or less where the root logger is set to less."""
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
