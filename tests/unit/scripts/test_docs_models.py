from support.scripts import load_script


def test_the_page_on_models_is_what_the_script_writes() -> None:
    script = load_script("docs_models")
    assert script.PAGE.read_text() == script.page(), "run: uv run python scripts/docs_models.py"


def test_every_family_has_a_record_of_its_server() -> None:
    script = load_script("docs_models")
    assert set(script.json.loads(script.RECORD.read_text())["families"]) == {family.key for family in script.FAMILIES}
