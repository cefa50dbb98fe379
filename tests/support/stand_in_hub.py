"""Stands in for the API of the Hugging Face hub: repositories are made and commits arrive, whose files it keeps."""

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

from support.http_fake import serve


class StandInHub:
    """Answers the requests of `huggingface_hub` without xet. Weights are uploaded as LFS objects, as on the hub."""

    def __init__(self) -> None:
        self.repositories: dict[str, bool] = {}
        """Whether each repository was made private."""
        self.files: dict[str, bytes] = {}
        self.refused_status: int | None = None
        """If set, the status of every answer."""
        self._objects: dict[str, bytes] = {}
        self._url = ""

    @contextmanager
    def served_url(self) -> Iterator[str]:
        with serve(self._answer) as url:
            self._url = url.removesuffix("/v1")
            yield self._url

    def _answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        if self.refused_status is not None:
            return self.refused_status, json.dumps({"error": "Invalid user token."}).encode()
        return 200, json.dumps(self._reply(method, path, body)).encode()

    def _reply(self, method: str, path: str, body: bytes) -> object:
        if method == "PUT":
            self._objects[path.rpartition("/")[2]] = body
            return {}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.repositories[name] = asked.get("visibility") == "private"
            return {"url": f"{self._url}/{name}"}
        if "/preupload/" in path:
            modes = {
                file["path"]: "lfs" if file["path"].endswith(".safetensors") else "regular"
                for file in json.loads(body)["files"]
            }
            return {"files": [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes.items()]}
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            uploads = [{**each, "actions": {"upload": {"href": f"{self._url}/lfs/{each['oid']}"}}} for each in objects]
            return {"transfer": "basic", "objects": uploads}
        if found := re.fullmatch(r"/api/models/(\w+/[\w-]+)/commit/main", path):
            self._commit([json.loads(line) for line in body.splitlines()])
            return {"success": True, "commitOid": "abc", "commitUrl": f"{self._url}/{found[1]}/commit/abc"}
        return {"errors": [], "warnings": []}

    def _commit(self, lines: list[dict]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[value["path"]] = self._objects[value["oid"]]
