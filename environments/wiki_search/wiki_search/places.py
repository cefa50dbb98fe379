"""An encyclopedia of the countries and larger cities of the world, from the facts of GeoNames (see the README).

Articles and questions are a function of the bundled tables: they are the same everywhere. A model may know some answers. The share
of rollouts that read the source tells looking up from knowing.
"""

import csv
import gzip
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from wiki_search.world import Article, Question, World

ASKED_RESIDENTS = 130_000
"""Questions are about cities of at least this size; the smaller ones are there to be told apart from them."""
CONTINENTS = {
    "AF": "Africa",
    "AN": "Antarctica",
    "AS": "Asia",
    "EU": "Europe",
    "NA": "North America",
    "OC": "Oceania",
    "SA": "South America",
}
_MAX_LISTED_CITIES = 5

Facts = Mapping[str, str]
"""One line of a table, by its columns."""


def make_places() -> World:
    """Make the encyclopedia. It is the same at every call."""
    countries = {facts["iso"]: facts for facts in _read_table("countries.tsv.gz")}
    cities = [city for city in _read_table("cities.tsv.gz") if city["countrycode"] in countries]
    by_country: dict[str, list[Facts]] = {code: [] for code in countries}
    for city in sorted(cities, key=lambda city: -int(city["population"])):
        by_country[city["countrycode"]].append(city)
    articles = [_describe_country(country, countries, by_country[code]) for code, country in countries.items()]
    articles += [_describe_city(city, countries[city["countrycode"]]) for city in cities]
    questions = [question for country in countries.values() for question in _ask_about_country(country, countries)]
    # A question that needs several articles names a city alone, so the name must be the only one of its kind.
    num_named = Counter(facts["name"].casefold() for facts in (*countries.values(), *cities))
    for number, city in enumerate(city for city in cities if int(city["population"]) >= ASKED_RESIDENTS):
        country = countries[city["countrycode"]]
        questions.append(_ask_about_city(city, country, number=number))
        if num_named[city["name"].casefold()] == 1 and country["name"] not in city["name"]:
            questions += _ask_further(city, country, by_country[country["iso"]], number=number)
    return World(articles=articles, questions=questions)


def _read_table(name: str) -> list[Facts]:
    with gzip.open(Path(__file__).with_name(name), "rt", encoding="utf-8", newline="") as file:
        return [{name: text.strip() for name, text in facts.items()} for facts in csv.DictReader(file, delimiter="\t")]


def _title(city: Facts, country: Facts) -> str:
    return f"{city['name']} ({country['name']})"


def _number(text: str) -> str:
    """Return a whole number with separators for its thousands."""
    return f"{float(text):,.0f}"


def _neighbours(country: Facts, countries: Mapping[str, Facts]) -> list[str]:
    return sorted(countries[code]["name"] for code in country["neighbours"].split(",") if code in countries)


def _describe_country(country: Facts, countries: Mapping[str, Facts], cities: Sequence[Facts]) -> Article:
    name, neighbours = country["name"], _neighbours(country, countries)
    parts = [
        f"{name} is a country or territory in {CONTINENTS[country['continentcode']]}.",
        f"Its capital is {country['capital']}." if country["capital"] else "",
        f"It covers {_number(country['areakm2'])} square kilometres and has {_number(country['population'])} residents.",
        f"The currency is the {country['currencyname']} ({country['currencycode']})." if country["currencyname"] else "",
        f"Names of its internet sites end in {country['tld']}." if country["tld"] else "",
        f"Its calling code is {country['phone']}." if country["phone"] else "",
        f"It borders {', '.join(neighbours)}." if neighbours else "It has no land border.",
        f"Largest cities: {', '.join(city['name'] for city in cities[:_MAX_LISTED_CITIES])}." if cities else "",
    ]
    return Article(title=name, text=" ".join(part for part in parts if part))


def _describe_city(city: Facts, country: Facts) -> Article:
    latitude, longitude = float(city["latitude"]), float(city["longitude"])
    north, east = "north" if latitude >= 0 else "south", "east" if longitude >= 0 else "west"
    is_capital = city["name"] == country["capital"]
    return Article(
        title=_title(city, country),
        text=f"{city['name']} is {'the capital' if is_capital else 'a city'} of {country['name']}. It has "
        f"{_number(city['population'])} residents. It lies at {abs(latitude):.2f} degrees {north} and "
        f"{abs(longitude):.2f} degrees {east}, in the time zone {city['timezone']}.",
    )


def _ask_about_country(country: Facts, countries: Mapping[str, Facts]) -> Iterator[Question]:
    name, neighbours = country["name"], _neighbours(country, countries)
    asked = [
        (f"What is the capital of {name}?", country["capital"]),
        (f"How many residents does {name} have?", _number(country["population"])),
        (f"How many square kilometres does {name} cover?", _number(country["areakm2"])),
        (f"What is the calling code of {name}?", country["phone"]),
        (f"Which country is the only one that borders {name}?", neighbours[0] if len(neighbours) == 1 else ""),
    ]
    for text, answer in asked:
        if answer not in ("", "0"):
            yield Question(text=text, answer=answer, source=name, num_steps=1)


def _ask_about_city(city: Facts, country: Facts, *, number: int) -> Question:
    """Return one question, whose kind alternates with the number."""
    title = _title(city, country)
    asked = [
        (f"How many residents does the city {title} have?", _number(city["population"])),
        (f"In which time zone is the city {title}?", city["timezone"]),
    ]
    text, answer = asked[number % len(asked)]
    return Question(text=text, answer=answer, source=title, num_steps=1)


def _ask_further(city: Facts, country: Facts, cities: Sequence[Facts], *, number: int) -> Iterator[Question]:
    """Yield a question whose answer is in the article of the city's country, or of the country's capital."""
    place = f"the country where the city {city['name']} lies"
    of_country = [
        (f"What is the currency of {place}?", country["currencyname"]),
        (f"How many residents does {place} have?", _number(country["population"])),
        (f"What do the names of internet sites of {place} end in?", country["tld"]),
        (f"How many square kilometres does {place} cover?", _number(country["areakm2"])),
    ]
    capital = next((found for found in cities if found["name"] == country["capital"]), None)
    if number % (len(of_country) + 1) == len(of_country):
        if capital is not None and capital is not city:
            text, answer = f"How many residents does the capital of {place} have?", _number(capital["population"])
            yield Question(text=text, answer=answer, source=_title(capital, country), num_steps=3)
        return
    text, answer = of_country[number % (len(of_country) + 1)]
    if answer not in ("", "0"):
        yield Question(text=text, answer=answer, source=country["name"], num_steps=2)
