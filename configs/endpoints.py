"""Servers by name, for `uv run eval --client.endpoint NAME`.

Each entry of ENDPOINTS has the address (`url` or `base_url`) and, where they are needed, the `model` to ask for and the key: either
`key`, the name of the environment variable that holds it (anything that is no such name is the key itself), or `api_key`, the key.
Keep keys themselves out of this file: read them from the environment.
"""

import os

ENDPOINTS = {
    "local": {
        "url": "http://127.0.0.1:8000/v1",
    },
    "Qwen/Qwen2.5-7B-Instruct": {
        "model": "Qwen/Qwen2.5-7B-Instruct",
        "url": "http://0.0.0.0:8007/v1",
        "key": "local",
    },
    "openai": {
        "model": "gpt-4.1-mini",
        "url": "https://api.openai.com/v1",
        "key": "OPENAI_API_KEY",
    },
    "default": {
        "base_url": "https://api.primeintellect.ai/v1",
        "api_key": os.getenv("PRIME_API_KEY"),
    },
}
