"""Reads named servers for the command `eval`: the table ENDPOINTS of a Python file (`configs/endpoints.py`).

The file is a Python program of the user. It runs in a process of its own, with the environment variables of this process, and only
its table is read. If it exits, fails or hangs, an error names the file. Keys are never written to disk.
"""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
from pydantic import ValidationError

from trivet.config.schema.evaluation import EvalClientConfig
from trivet.config.schema.inference import ClientConfig
from trivet.config.tables import as_table
from trivet.errors import ConfigError

KEY_VARIABLE = "EVAL_ENDPOINT_KEY"
"""The environment variable that carries a key which the file itself contains, within this command's processes."""

_READ_TIMEOUT_S = 30.0
"""Longest time for the file to run. It should only define a table."""
_VARIABLE_NAME = re.compile(r"[A-Z][A-Z0-9_]*")
_READER_PROGRAM = """
import json, os, runpy, sys
result = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the file prints is no part of the result
table = runpy.run_path(sys.argv[1]).get("ENDPOINTS")
result.write(json.dumps(table))
"""


class Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named server, with the fields that it has in the file."""

    model: str | None = None
    url: str | None = None
    base_url: str | None = None
    """Another name of `url`."""
    key: str | None = None
    """The key itself, or the name of the environment variable that has it."""
    api_key: str | msgspec.UnsetType | None = msgspec.UNSET
    """The key itself. None: the file read it from a variable that is not set."""

    @property
    def address(self) -> str:
        """The base URL."""
        return self.url or self.base_url or ""

    @property
    def key_variable(self) -> str | None:
        """The environment variable that has the key."""
        return self.key if self.key is not None and _VARIABLE_NAME.fullmatch(self.key) else None

    @property
    def literal_key(self) -> str | None:
        """The key itself, if the file contains it; None if the file names a variable, or nothing."""
        return self.api_key or (None if self.key_variable else self.key)


def read_endpoints(path: Path, *, timeout_s: float = _READ_TIMEOUT_S) -> dict[str, Endpoint]:
    """Run the file at `path` and return its endpoints by name.

    Raises:
        ConfigError: the file is missing, fails, or its table has another form.
    """
    if not path.is_file():
        raise ConfigError(f"endpoints_path ({path}) is not a file; it must be a Python file with a table ENDPOINTS")
    command = [sys.executable, "-P", "-c", _READER_PROGRAM, str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL, check=False)
    except subprocess.TimeoutExpired as exc:
        raise ConfigError(f"{path} did not end within {timeout_s:g} s; it should only define ENDPOINTS") from exc
    if done.returncode or not done.stdout:
        reason = (done.stderr.strip().splitlines() or [f"it exited with {done.returncode}"])[-1]
        raise ConfigError(f"{path} failed: {reason}")
    table = as_table(json.loads(done.stdout))
    if table is None:
        raise ConfigError(f"{path} defines no table ENDPOINTS = {{name: {{...}}}}")
    endpoints: dict[str, Endpoint] = {}
    for name, fields in table.items():
        try:
            endpoints[name] = msgspec.convert(fields, Endpoint)
        except msgspec.ValidationError as exc:
            known = ", ".join(Endpoint.__struct_fields__)
            problem = f"{exc}; it is a table of texts with `url`, known are {known}"
            raise ConfigError(f"endpoint {name!r} in {path}: {problem}") from exc
        if not endpoints[name].address:
            raise ConfigError(f"endpoint {name!r} in {path} has no url (or base_url)")
    return endpoints


def choose_client(
    config: EvalClientConfig, *, endpoints_path: Path, environ: Mapping[str, str]
) -> tuple[ClientConfig, Endpoint | None]:
    """Return the configuration of the servers, and the endpoint that `config` names; None if it names the servers itself.

    Raises:
        ConfigError: there is no endpoint of that name, or the variable with its key is not set.
    """
    fields = config.model_dump(exclude={"endpoint"})
    if config.endpoint is None:
        return ClientConfig(**fields), None
    endpoints = read_endpoints(endpoints_path)
    endpoint = endpoints.get(config.endpoint)
    if endpoint is None:
        raise ConfigError(
            f"client.endpoint ({config.endpoint!r}) is not in {endpoints_path}; there are: {', '.join(endpoints) or 'none'}"
        )
    if endpoint.key_variable is not None and endpoint.key_variable not in environ:
        raise ConfigError(
            f"endpoint {config.endpoint!r} in {endpoints_path} has its key in the variable {endpoint.key_variable}, which is not "
            "set: export it"
        )
    if endpoint.api_key is None and endpoint.key is None:  # another service's key must not go there
        raise ConfigError(
            f"endpoint {config.endpoint!r} in {endpoints_path} has no api_key: the variable it is read from is not set; "
            "export it, or take the line out for a server that needs none"
        )
    variable = endpoint.key_variable or (KEY_VARIABLE if endpoint.literal_key else config.api_key_var[0])
    try:
        return ClientConfig(**{**fields, "base_url": [endpoint.address], "api_key_var": [variable]}), endpoint
    except ValidationError as exc:
        reason = exc.errors()[0]["msg"]
        raise ConfigError(f"endpoint {config.endpoint!r} in {endpoints_path}: url ({endpoint.address}) {reason}") from exc
