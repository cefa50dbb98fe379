"""Sections that say how to reach inference servers, for the orchestrator and for `eval`."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, model_validator

from trivet.config.sections.addresses import Host, ServerAddress
from trivet.config.sections.base import MAX_WAIT_S, Section
from trivet.wire.servers import ServerAccess, server_root


class ElasticConfig(Section):
    """Servers that come and go: every address that `hostname` resolves to, or that `servers_file` lists, is a server."""

    hostname: Host | None = None
    """DNS name, looked up every `sync_interval`. A new address joins once it serves the current policy; a gone one is removed."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Port of every server behind `hostname`."""
    servers_file: Path | None = None
    """File with the address of a server in each line, read every `sync_interval`. A run of several nodes writes one itself."""
    sync_interval: float = Field(default=5.0, gt=0, le=MAX_WAIT_S)
    """Time between two look-ups, seconds."""

    @model_validator(mode="after")
    def _one_source(self) -> "ElasticConfig":
        if (self.hostname is None) == (self.servers_file is None):
            raise ValueError("set hostname or servers_file: one of them says where the servers are")
        return self

    @property
    def source(self) -> str:
        """The key that says where the addresses are from, with its value, for messages."""
        if self.servers_file is not None:
            return f"client.elastic.servers_file = {str(self.servers_file)!r}"
        return f"client.elastic.hostname = {self.hostname!r}"


class ClientConfig(Section):
    """The inference servers, and how to reach them."""

    base_url: list[ServerAddress] = Field(default=["http://127.0.0.1:8000/v1"], min_length=1)
    """One or more servers. All must be up when the run starts; one that fails later is marked unhealthy until it is back."""
    elastic: ElasticConfig | None = None
    """Find the servers by DNS name instead of `base_url`; they may come and go."""
    api_key_var: list[str] = Field(default=["OPENAI_API_KEY"], min_length=1)
    """Environment variable that holds the key: one for all servers, or one per `base_url`. A local server needs none."""
    headers: dict[str, str] = {}
    """HTTP headers of every request to every server."""
    timeout: float = Field(default=1200.0, gt=0, le=MAX_WAIT_S)
    """Longest time for one request, seconds."""
    admin_timeout: float = Field(default=300.0, gt=0, le=MAX_WAIT_S)
    """Longest time for loading weights and for a question about a server's state, seconds; then the server is marked unhealthy."""
    wait_for_ready_timeout: float = Field(default=1800.0, gt=0, le=MAX_WAIT_S)
    """Longest wait for a server to become ready at start, or to sleep, and longest time without any server later, seconds."""

    @model_validator(mode="after")
    def _one_key_each(self) -> "ClientConfig":
        if len(self.api_key_var) not in (1, len(self.base_url)):
            raise ValueError(
                f"api_key_var names {len(self.api_key_var)} variables for {len(self.base_url)} servers in base_url; name one "
                "for all, or one per server"
            )
        if len({server_root(url) for url in self.base_url}) != len(self.base_url):
            raise ValueError(f"base_url names a server twice: {', '.join(self.base_url)}; name each once")
        return self

    def api_key(self, base_url: str, environ: Mapping[str, str]) -> str | None:
        """Return the key for the server at `base_url`, None when its variable is not set."""
        return self.access.api_key(base_url, environ)

    def request_headers(self, base_url: str, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the headers of every request to the server at `base_url`, with its key where the variable is set."""
        key = self.api_key(base_url, environ)
        return {**self.headers, **({"Authorization": f"Bearer {key}"} if key else {})}

    @property
    def access(self) -> ServerAccess:
        """How an environment worker reaches the servers."""
        return ServerAccess(
            base_urls=list(self.base_url),
            key_variables=list(self.api_key_var),
            headers=dict(self.headers),
            timeout_s=self.timeout,
        )


class ConcurrencyConfig(Section):
    """Rollouts in flight, adapted to the servers' load as their `/metrics` report it.

    The limit starts at what `oversampling_factor` and `max_concurrent` allow. It falls only when the servers evict sequences from
    their cache and compute them again, or when more requests wait than run. It never falls below the number of requests that
    run, so that a run that fits is never slowed.
    """

    adaptive: bool = True
    """Adapt the limit; false keeps the first one. Servers without `/metrics` are not considered."""
    initial_inflight: int | None = Field(default=None, ge=1)
    """Rollouts in flight at the start; unset: as many as allowed."""
    min_inflight: int = Field(default=16, ge=1)
    """The limit never falls below this."""
    interval: float = Field(default=5.0, gt=0)
    """Time between two readings of the servers' load, seconds."""
