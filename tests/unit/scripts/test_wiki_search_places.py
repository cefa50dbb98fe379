import gzip
from pathlib import Path

from support.scripts import load_script

places = load_script("wiki_search_places")


def city(name: str, residents: int, country: str = "CH") -> dict:
    return {"name": name, "countrycode": country, "population": residents}


def test_the_largest_city_of_a_name_in_a_country_is_kept():
    cities = [city("Wil", 5), city("Wil", 9), city("wil", 7, "AT"), city("Bern", 3), city("Olten", 1)]
    chosen = places.choose_cities(cities, min_residents=3)
    assert [(one["countrycode"], one["name"], one["population"]) for one in chosen] == [
        ("AT", "wil", 7),
        ("CH", "Bern", 3),
        ("CH", "Wil", 9),
    ]


def test_a_table_has_the_same_bytes_each_time_and_only_its_columns(tmp_path: Path):
    for name in ("first", "second"):
        places.write_table(tmp_path / name, ("name", "population"), [city("Bern", 3)])
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    assert gzip.decompress((tmp_path / "first").read_bytes()) == b"name\tpopulation\nBern\t3\n"
