"""Opens one source of records: a file, a split in a directory, or a split of a data set of the hub.

`conversations.mixture` calls it. JSONL is not read by `datasets`: its tables would give every record the keys of all other records.
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

_TABLE_LOADERS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv"}
"""The loader of `datasets` for a file with a table, by the suffix of its name."""

_SLICED_SPLIT = re.compile(r"(?P<split>[^\[\]+]+)\[(?P<slice>[^\[\]]*)\]")
"""A split with a slice, such as `train[:5%]`."""


@dataclass(frozen=True, slots=True)
class Records(Sequence[DatasetRecord]):
    """A slice of the records of one source."""

    stored: Any
    """All records of the split, by index."""
    indices: range
    """The indices in `stored` of the slice's records."""
    is_columnar: bool
    """The records come from a table, not from lines of JSON. Nulls that the table's columns add are then removed."""

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        record = self.stored[self.indices[index]]
        return _without_nulls(record) if self.is_columnar else record


def open_source(name: str, *, subset: str | None = None, split: str | None = None, key: str = "data") -> Records:
    """Open the records of a split.

    Args:
        name: a file, a directory, or a data set of the hub.
        split: may have a slice, such as `train[:5%]`; None: `train`.
        key: the name of the configuration's section, for errors.

    Raises:
        ConfigError: there is no such data, it cannot be read or reached, or it has no records.
    """
    sliced_split = _SLICED_SPLIT.fullmatch(split or DEFAULT_SPLIT)
    split_name = sliced_split["split"] if sliced_split is not None else split or DEFAULT_SPLIT
    stored = _open_local(name, subset, split_name, key) if looks_local(name) else _load(name, subset, split_name, key)
    indices = range(len(stored))
    if sliced_split is not None:
        from datasets import ReadInstruction

        # `datasets` parses the slice. It needs the name of a split and its length, and any name will do.
        instruction = f"{DEFAULT_SPLIT}[{sliced_split['slice']}]"
        try:
            (bounds,) = ReadInstruction.from_spec(instruction).to_absolute({DEFAULT_SPLIT: len(stored)})
        except (ValueError, AssertionError) as exc:
            problem = f"{split!r} is no slice ({exc}); write one as `train[:1000]` or `train[95%:]`"
            raise ConfigError(f"{key}.splits: {problem}") from exc
        indices = indices[bounds.from_ : bounds.to]
    if not indices:
        selection = "".join(f", {word} {value!r}" for word, value in (("subset", subset), ("split", split)) if value)
        raise ConfigError(f"{key}.name = {name!r}{selection} holds no records")
    return Records(stored, indices, not isinstance(stored, list))


def _open_local(name: str, subset: str | None, split: str, key: str) -> Any:
    """Return all records of a split in a local file or directory: a list, or a table of `datasets`."""
    path = usable_path(name, key=f"{key}.name")
    if path.is_file():
        if split != DEFAULT_SPLIT:
            raise ConfigError(
                f"{key}.splits: the file {path} is one split, {DEFAULT_SPLIT!r}, and has no {split!r}; give a directory with a "
                "file for each split"
            )
        loader = _TABLE_LOADERS.get(path.suffix)
        return _load(loader, None, split, key, file=path) if loader else read_json(path)
    if not path.is_dir():
        raise ConfigError(f"{key}.name = {name!r} is neither a file nor a directory")
    directory = path
    if subset is not None and (path / subset).is_dir():
        declared_subsets: Sequence[str] = ()
        if (
            path / "README.md"
        ).is_file():  # may declare subsets, as on the hub, whose files are not in a directory of that name
            from datasets import get_dataset_config_names

            declared_subsets = get_dataset_config_names(str(path))
        directory = path if subset in declared_subsets else path / subset
    if (directory / "dataset_dict.json").is_file() or (directory / "dataset_info.json").is_file():
        if subset is not None and directory == path:
            raise ConfigError(
                f"{key}.subsets: {path} was saved by `datasets` with its splits alone, and has no subset {subset!r}; remove "
                f"{key}.subsets"
            )
        return _read_saved(directory, split, key)
    files = {file.stem: file for file in sorted(directory.glob("*.jsonl"))}
    if files and (subset is None or directory != path):
        if split not in files:
            raise ConfigError(f"{key}.splits: {directory} has the splits {', '.join(files)}, and no {split!r}")
        return read_json(files[split])
    return _load(str(directory), None if directory != path else subset, split, key)


def read_json(path: Path) -> list[DatasetRecord]:
    """Read one record per line. A file whose name ends in `.json` may instead have one list of all records.

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
        raise ConfigError(f"{path} is not text in UTF-8: {exc}; tables end in {', '.join(_TABLE_LOADERS)}") from exc


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
    """Return the table of `split` from a directory that `save_to_disk` of `datasets` wrote, with one split or several."""
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
    """Return a split as a table of `datasets`. `name` is a directory, a data set of the hub, or the loader that reads `file`."""
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
    """Remove nulls from a record of a table, except `content`, which is null in a message that only calls tools.

    A table's columns give every message the keys of all other messages, with null as the value. A chat template would treat such
    keys as present.
    """
    if isinstance(value, Mapping):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None or name == "content"}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
