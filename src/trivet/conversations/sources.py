"""Opens one source of records: a file, a split in a directory, or a split of a data set of the hub.

Called by conversations.mixture. JSONL is read line by line and not by `datasets`, whose columns would give every record the keys
of all others.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trivet.config.check_files import looks_local
from trivet.config.tables import as_list, as_table
from trivet.config.user_input import parse_json, usable_path
from trivet.conversations.records import DatasetRecord
from trivet.errors import ConfigError
from trivet.process.proxies import PROXY_ERRORS

DEFAULT_SPLIT = "train"

_TABLES = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv"}
"""The loader of `datasets` for each suffix of a file that is a table."""

_SLICED = re.compile(r"(?P<split>[^\[\]+]+)\[(?P<slice>[^\[\]]*)\]")


@dataclass(frozen=True, slots=True)
class Records(Sequence[DatasetRecord]):
    """A slice of the records of one source. A columnar one drops the nulls that columns add."""

    stored: Any
    """All records of the split, by index."""
    indices: range
    """The part of them that this slice has."""
    is_columnar: bool
    """The records come from a table, not from lines of JSON."""

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        record = self.stored[self.indices[index]]
        return _without_nulls(record) if self.is_columnar else record


def open_source(name: str, *, subset: str | None = None, split: str | None = None, key: str = "data") -> Records:
    """Open the records of `split` (unset: `train`), which may carry a slice: `train[:5%]`.

    Args:
        key: section of the configuration, for errors.

    Raises:
        ConfigError: there is no such data, it cannot be read or reached, or it has no records.
    """
    sliced = _SLICED.fullmatch(split or DEFAULT_SPLIT)
    whole = sliced["split"] if sliced is not None else split or DEFAULT_SPLIT
    stored = _open_local(name, subset, whole, key) if looks_local(name) else _load(name, subset, whole, key)
    indices = range(len(stored))
    if sliced is not None:
        from datasets import ReadInstruction

        try:
            (part,) = ReadInstruction.from_spec(f"{DEFAULT_SPLIT}[{sliced['slice']}]").to_absolute({DEFAULT_SPLIT: len(stored)})
        except (ValueError, AssertionError) as exc:
            problem = f"{split!r} is no slice ({exc}); write one as `train[:1000]` or `train[95%:]`"
            raise ConfigError(f"{key}.splits: {problem}") from exc
        indices = indices[part.from_ : part.to]
    if not indices:
        part = "".join(f", {word} {value!r}" for word, value in (("subset", subset), ("split", split)) if value)
        raise ConfigError(f"{key}.name = {name!r}{part} holds no records")
    return Records(stored, indices, not isinstance(stored, list))


def _open_local(name: str, subset: str | None, split: str, key: str) -> Any:
    path = usable_path(name, key=f"{key}.name")
    if path.is_file():
        if split != DEFAULT_SPLIT:
            raise ConfigError(
                f"{key}.splits: the file {path} is one split, {DEFAULT_SPLIT!r}, and has no {split!r}; give a directory with a "
                "file for each split"
            )
        table = _TABLES.get(path.suffix)
        return _load(table, None, split, key, file=path) if table else read_json(path)
    if not path.is_dir():
        raise ConfigError(f"{key}.name = {name!r} is neither a file nor a directory")
    place = path
    if subset is not None and (path / subset).is_dir():
        described: Sequence[str] = ()
        if (path / "README.md").is_file():  # one that the hub reads: a subset's files need not lie in the directory of its name
            from datasets import get_dataset_config_names

            described = get_dataset_config_names(str(path))
        place = path if subset in described else path / subset
    if (place / "dataset_dict.json").is_file() or (place / "dataset_info.json").is_file():
        if subset is not None and place == path:
            raise ConfigError(
                f"{key}.subsets: {path} was saved by `datasets` with its splits alone, and has no subset {subset!r}; remove "
                f"{key}.subsets"
            )
        return _read_saved(place, split, key)
    files = {file.stem: file for file in sorted(place.glob("*.jsonl"))}
    if files and (subset is None or place != path):
        if split not in files:
            raise ConfigError(f"{key}.splits: {place} has the splits {', '.join(files)}, and no {split!r}")
        return read_json(files[split])
    return _load(str(place), None if place != path else subset, split, key)


def read_json(path: Path) -> list[DatasetRecord]:
    """Read one record per line, or all from the list in a file that ends in `.json`.

    Raises:
        ConfigError: the file is no text, or a line or an item of the list is not a JSON object.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            is_list = path.suffix == ".json" and file.read(1024).lstrip().startswith("[")
            file.seek(0)
            if is_list:
                items = enumerate(as_list(_parse(file.read(), str(path))) or [], start=1)
                return [_as_record(item, f"{path}, record {number} of the list,") for number, item in items]
            lines = [(f"{path}, line {number},", line) for number, line in enumerate(file, start=1) if line.strip()]
            return [_as_record(_parse(line, place), place) for place, line in lines]
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path} is not text in UTF-8: {exc}; tables end in {', '.join(_TABLES)}") from exc


def _parse(text: str, place: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as exc:
        raise ConfigError(f"{place} is not JSON: {exc}") from exc


def _as_record(value: Any, place: str) -> DatasetRecord:
    if (record := as_table(value)) is None:
        raise ConfigError(f"{place} must be a JSON object, got {str(value)[:60]!r}")
    return record


def _read_saved(place: Path, split: str, key: str) -> Any:
    """Return the table of `split` that `save_to_disk` wrote, alone or with those of other splits."""
    from datasets import load_from_disk

    try:
        loaded: Any = load_from_disk(str(place))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{key}.name: {place} was saved by `datasets` and cannot be read: {exc}") from exc
    if not isinstance(loaded, Mapping):
        if split != DEFAULT_SPLIT:
            raise ConfigError(f"{key}.splits: {place} holds one split, saved as such, and no {split!r}; remove {key}.splits")
        return loaded
    if split not in loaded:
        raise ConfigError(f"{key}.splits: {place} has the splits {', '.join(sorted(loaded))}, and no {split!r}")
    return loaded[split]


def _load(name: str, subset: str | None, split: str, key: str, *, file: Path | None = None) -> Any:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        return load_dataset(name, subset, split=split, data_files=None if file is None else str(file))
    except ConnectionError as exc:
        raise ConfigError(
            f"{key}.name = {name!r} is treated as a data set of the Hugging Face hub, which cannot be reached: {exc}. On a machine "
            f"with network, download it (`hf download --repo-type dataset {name} --local-dir DIR`) and set {key}.name to the "
            f"directory; for a file of your own give its path"
        ) from exc
    except (OSError, *PROXY_ERRORS, DatasetsError) as exc:
        reason = " ".join(str(exc).split()).rstrip(".")
        raise ConfigError(
            f"{key}.name = {str(file or name)!r}, subset {subset or 'not set'}, split {split!r}, cannot be loaded: {reason}. "
            f"Look at {key}.name, {key}.subsets and {key}.splits; for a file of your own give its path"
        ) from exc


def _without_nulls(value: Any) -> Any:
    """Drop the nulls that columns add: they give every message the keys of all others, and templates would read those as present.

    `content` stays: it is null in a message that only calls tools.
    """
    if isinstance(value, Mapping):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None or name == "content"}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
