import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trivet.config.layout import SECRET_FILE, RunLayout
from trivet.errors import ConfigError
from trivet.secret import find_secret, make_secret, read_secret, share_secret


def test_a_secret_is_made_once_for_its_owner_alone(tmp_path):
    file = RunLayout(tmp_path / "run").secret
    made = make_secret(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert (make_secret(file).token, read_secret(file).token) == (made.token, made.token)
    assert len(bytes.fromhex(made.token)) == 32
    assert file.read_text().strip() == made.token
    assert list(file.parent.iterdir()) == [file]


def test_roles_that_start_at_one_moment_share_one_secret(tmp_path, monkeypatch):
    names = itertools.count()
    monkeypatch.setattr(os, "getpid", lambda: next(names))  # threads stand in for processes
    with ThreadPoolExecutor(8) as pool:
        tokens = {secret.token for secret in pool.map(make_secret, [tmp_path / ".secret"] * 8)}
    assert len(tokens) == 1


def test_the_named_file_comes_before_that_of_the_output_directory(tmp_path):
    named = make_secret(tmp_path / "elsewhere")
    found = find_secret(RunLayout(tmp_path / "run"), environ={SECRET_FILE: str(tmp_path / "elsewhere")})
    assert found.token == named.token
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", ["", "abc", "x" * 64, "0" * 63, "0" * 66, "é" * 32])
def test_another_file_is_not_taken_for_a_secret(tmp_path, content):
    file = tmp_path / "notes"
    file.write_text(content)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="does not hold a run's secret"):
        read_secret(file)


def test_a_missing_file_is_named_with_the_variable(tmp_path):
    with pytest.raises(ConfigError, match=f"No such file or directory; name the file of the run with {SECRET_FILE}"):
        find_secret(RunLayout(tmp_path), environ={SECRET_FILE: str(tmp_path / "none")})


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_secret_that_others_may_read_is_refused(tmp_path, mode):
    file = tmp_path / ".secret"
    make_secret(file)
    file.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_secret(file)


def test_keys_of_different_purposes_differ_and_nothing_prints_them(tmp_path):
    secret = make_secret(tmp_path / ".secret")
    assert secret.derive("a") == make_secret(tmp_path / ".secret").derive("a")
    assert len({secret.derive("a"), secret.derive("b"), bytes.fromhex(secret.token)}) == 3
    assert secret.token not in f"{secret!r} {secret}"


def test_roles_get_the_absolute_path_of_the_secret_that_was_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    layout = RunLayout(Path("run"))
    assert share_secret(layout, environ={}) == {SECRET_FILE: str(tmp_path / "run" / ".secret")}
    make_secret(tmp_path / "elsewhere")
    assert share_secret(layout, environ={SECRET_FILE: "elsewhere"}) == {SECRET_FILE: str(tmp_path / "elsewhere")}
    (tmp_path / "run" / ".secret").unlink()
    assert share_secret(layout, environ={SECRET_FILE: "run/.secret"}) == {SECRET_FILE: str(tmp_path / "run" / ".secret")}
    assert find_secret(layout, environ={}).token == read_secret(tmp_path / "run" / ".secret").token
