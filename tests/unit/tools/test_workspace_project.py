"""A workspace's project file has the checkout's requirements and the source of trivet."""

import tomllib

import pytest

from support.documents import ROOT
from trivet.tools.workspace_project import describe_source, missing_entries, pip_find_links, project_file


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
