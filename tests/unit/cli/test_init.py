import ast
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from support.documents import ROOT
from trivet.cli.init import (
    ENVIRONMENTS,
    describe_source,
    missing_entries,
    pip_find_links,
    project_file,
    workspace_files,
    write_workspace,
)
from trivet.cli.main import main
from trivet.config.load import load_config
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.vf_rl import VfRLConfig
from trivet.dialects.vf_translation import load_run

PROJECT = '[project]\nname = "lab"\n'


@pytest.fixture(scope="module")
def files() -> Mapping[str, bytes]:
    return workspace_files(project=PROJECT)


@pytest.fixture
def workspace(tmp_path: Path, files: Mapping[str, bytes]) -> Path:
    write_workspace(tmp_path / "lab", files)
    return tmp_path / "lab"


def test_a_new_workspace_has_a_project_file_and_names_the_two_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = tmp_path / "lab"
    assert main(["init", str(lab)]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-3:] == [
        f"  cd {lab}",
        "  uv sync --extra cpu --compile-bytecode    # with an NVIDIA GPU: --extra cuda",
        "  uv run trivet quickstart",
    ]
    project = tomllib.loads((lab / "pyproject.toml").read_text())
    for name, source in project["tool"]["uv"]["sources"].items():
        assert name == "trivet" or (lab / source["path"] / "pyproject.toml").is_file()


def test_every_environment_is_a_package_and_every_file_of_it_is_there(workspace: Path) -> None:
    for name in ENVIRONMENTS:
        own, original = (root / "environments" / name.replace("-", "_") for root in (workspace, ROOT))
        assert tomllib.loads((own / "pyproject.toml").read_text())["project"]["name"] == name
        tracked = subprocess.run(["git", "ls-files", "."], cwd=original, capture_output=True, text=True, check=False).stdout
        assert all((own / file).read_bytes() == (original / file).read_bytes() for file in tracked.split())
    assert not list(workspace.rglob("__pycache__"))


def test_every_configuration_of_the_checkout_is_there_and_loads(workspace: Path) -> None:
    names = {path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.toml")}
    assert {path.relative_to(workspace) for path in (workspace / "configs").rglob("*.toml")} == names
    models = {"sft.toml": SftConfig, "eval.toml": EvalConfig}
    for name in names:
        words = ["@", str(workspace / name)]
        if name.parent.name == "vf-rl":
            load_run(load_config(VfRLConfig, words, environ={}), environ={})
        else:
            load_config(models.get(name.name, RLConfig), words, environ={})


def test_both_dialects_name_the_same_environments(workspace: Path) -> None:
    for name in ENVIRONMENTS:
        own = load_config(RLConfig, ["@", str(workspace / f"configs/{name.replace('-', '_')}/rl.toml")], environ={}).config
        dialect = load_config(VfRLConfig, ["@", str(workspace / f"configs/vf-rl/{name}.toml")], environ={})
        assert [env.id for env in own.orchestrator.env] == [
            env.id for env in load_run(dialect, environ={}).config.orchestrator.env
        ]
    ast.parse((workspace / "configs/endpoints.py").read_text())


def test_files_that_exist_are_left_as_they_are_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["init", str(tmp_path)]) == 0
    assert "left as they are, and different from the examples: README.md\n" in capsys.readouterr().out
    assert (tmp_path / "README.md").read_text() == (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "configs/quickstart/rl.toml").is_file()


def test_a_link_that_leads_nowhere_is_left_as_it_is(tmp_path: Path, files: Mapping[str, bytes]) -> None:
    (tmp_path / "README.md").symlink_to(tmp_path / "elsewhere")
    assert write_workspace(tmp_path, files)[1] == ["README.md"]
    assert not (tmp_path / "elsewhere").exists()


def test_a_part_of_a_workspace_is_completed(workspace: Path, files: Mapping[str, bytes]) -> None:
    (workspace / "configs/quickstart/rl.toml").unlink()
    (workspace / "environments/wordle/pyproject.toml").unlink()
    created, kept = write_workspace(workspace, files)
    assert sorted(created) == ["configs/quickstart/rl.toml", "environments/wordle/pyproject.toml"]
    assert kept == []
    assert write_workspace(workspace, files) == ([], [])


def test_a_project_file_that_exists_is_not_changed_and_what_to_add_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = '[project]\nname = "mine"\nversion = "1"\ndependencies = ["Wordle>=0.1", "trivet[cpu]"]\n'
    (tmp_path / "pyproject.toml").write_text(mine)
    assert main(["init", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert (tmp_path / "pyproject.toml").read_text() == mine
    additions = said[said.index("lacks:\n") : said.index("A new one would be")].splitlines()[1:]
    assert "  project.dependencies: gsm8k" in additions
    assert "  tool.uv.override-dependencies" in additions
    assert "  tool.uv.sources" in additions
    assert not any("wordle" in line or "name" in line for line in additions)
    assert not any("optional-dependencies" in line or "conflicts" in line for line in additions), "trivet[cpu] is the build"
    assert "  uv sync --compile-bytecode\n" in said


def test_a_project_file_that_lacks_nothing_is_said_to_be_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path)]) == 0
    project = tmp_path / "pyproject.toml"
    project.write_text(project.read_text() + "# mine\n")
    capsys.readouterr()
    assert main(["init", str(tmp_path)]) == 0
    assert "has everything that a workspace needs; it was not changed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [("pyproject.toml", "[project\n", "pyproject.toml cannot be read"), ("configs", "a file", "configs")],
)
def test_a_place_that_cannot_be_read_or_written_is_named(tmp_path: Path, capsys, file: str, text: str, said: str) -> None:
    (tmp_path / file).write_text(text)
    assert main(["init", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_without_a_directory_the_workspace_is_made_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trivet.cli.init import main as vf_setup

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["vf-setup"])
    assert vf_setup() == 0
    assert (tmp_path / "configs/vf-rl/wiki-search.toml").is_file()


def test_init_is_imported_without_any_installed_package() -> None:
    program = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); import trivet.cli.main, trivet.cli.init"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_settings_of_the_resolution_are_those_of_the_checkout() -> None:
    own = tomllib.loads(project_file(trivet_source=None, find_links=[]))
    checkout = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert own["project"]["requires-python"] == checkout["project"]["requires-python"]
    names = ["exclude-newer", "environments", "constraint-dependencies", "conflicts", "override-dependencies"]
    assert {name: own["tool"]["uv"][name] for name in names} == {name: checkout["tool"]["uv"][name] for name in names}
    assert set(own["dependency-groups"]["smollm2"]) <= set(checkout["dependency-groups"]["dev"])
    assert set(own["project"]["optional-dependencies"]) == set(checkout["project"]["optional-dependencies"])
    assert "find-links" not in own["tool"]["uv"]
    assert "trivet" not in own["tool"]["uv"]["sources"]


def test_places_of_wheels_and_the_source_are_written_as_toml() -> None:
    own = tomllib.loads(project_file(trivet_source='{ path = "/a b/x.whl" }', find_links=["/wheels", 'a"b']))
    assert own["tool"]["uv"]["find-links"] == ["/wheels", 'a"b']
    assert own["tool"]["uv"]["sources"]["trivet"] == {"path": "/a b/x.whl"}


@pytest.mark.parametrize(
    ("direct_url", "expected"),
    [
        (None, None),
        ({"url": "file:///a%20b/x.whl", "archive_info": {}}, {"path": "/a b/x.whl"}),
        ({"url": "file:///src", "dir_info": {"editable": True}}, {"path": "/src", "editable": True}),
        ({"url": "file:///src", "dir_info": {}}, {"path": "/src"}),
        ({"url": "https://host/x.whl", "archive_info": {}}, {"url": "https://host/x.whl"}),
        (
            {"url": "https://host/x.git", "vcs_info": {"vcs": "git", "commit_id": "ab12"}},
            {"git": "https://host/x.git", "rev": "ab12"},
        ),
    ],
)
def test_the_source_is_where_the_installed_one_came_from(direct_url: dict | None, expected: dict | None) -> None:
    source = describe_source(direct_url)
    assert (None if source is None else tomllib.loads(f"trivet = {source}")["trivet"]) == expected


def test_what_uv_and_pip_were_told_is_taken_once_and_in_order(tmp_path) -> None:
    environ = {"UV_FIND_LINKS": "/one,/two", "PIP_FIND_LINKS": "/two /three"}
    assert list(pip_find_links(environ))[:3] == ["/one", "/two", "/three"]


def test_a_requirement_is_present_with_any_version_and_extra() -> None:
    wanted = {"project": {"name": "x", "dependencies": ["trivet", "math-python"]}, "tool": {"uv": {"a": 1, "package": False}}}
    project = {"project": {"dependencies": ["trivet[cpu]>=0.1", "math_python"]}}
    assert list(missing_entries(project, wanted)) == ["tool.uv.a"]
    assert list(missing_entries({}, wanted)) == ["project.dependencies", "tool.uv.a"]
    assert list(missing_entries({"project": {"dependencies": []}, "tool": {"uv": {"a": 2}}}, wanted)) == [
        "project.dependencies: trivet",
        "project.dependencies: math-python",
    ]
