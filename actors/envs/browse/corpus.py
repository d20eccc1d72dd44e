"""An invented encyclopedia: pages about towns, people and works, whose facts are spread so that answers need several.

A corpus is drawn from its number alone: the same on any day and machine.
"""

from __future__ import annotations

import random
import re
import sqlite3
import threading
from dataclasses import dataclass
from functools import lru_cache

TOWNS, PEOPLE, WORKS = 60, 140, 140
RESULTS = 4  # of a search
SNIPPET_WORDS = 8
FIRST_YEAR, LAST_YEAR = 1610, 1890

_STARTS = ("Al", "Bre", "Cor", "Dul", "Es", "Fen", "Gor", "Hal", "Ist", "Jor", "Kel", "Lun", "Mar", "Nor", "Os", "Pel")
_MIDDLES = ("a", "e", "i", "o", "u", "an", "el", "or", "im", "un")
_TOWN_ENDS = ("berg", "ford", "hain", "mouth", "stad", "vik", "wick", "minster")
_LAST_ENDS = ("dov", "gren", "lin", "mak", "nari", "quist", "sen", "tano", "vask", "zol")
_FIRST_NAMES = (
    "Ada", "Bruno", "Clara", "Diego", "Edda", "Felix", "Greta", "Hugo", "Ilse", "Jonas",
    "Karla", "Lasse", "Mira", "Nils", "Olga", "Paul", "Rosa", "Sven", "Tilda", "Ugo",
)  # fmt: skip
_RIVERS = ("Amber", "Brann", "Cressa", "Dorn", "Eltra", "Fjell", "Garra", "Hesse", "Ivel", "Lorn", "Mese", "Orra")
_REGIONS = ("Aldermark", "Brinland", "Caldoria", "Dunmoor", "Estvale", "Halland", "Korvia", "Ostmark")
_CRAFTS = ("glass", "lace", "clocks", "salt", "paper", "bells", "cheese", "silk", "pottery", "ink")
_QUALITIES = ("Silent", "Golden", "Broken", "Hidden", "Last", "Winter", "Scarlet", "Distant", "Paper", "Hollow")
_THINGS = (
    "Harbour", "Garden", "Lantern", "Orchard", "Bridge", "Mirror", "Voyage", "Tower", "Meadow", "Letter",
    "Forest", "Window", "Island", "Market",
)  # fmt: skip
# What is made, and by whom.
MAKERS = {"novel": "writer", "opera": "composer", "painting": "painter"}


@dataclass(frozen=True)
class Town:
    id: str
    title: str
    region: str
    river: str
    craft: str
    founded: int


@dataclass(frozen=True)
class Person:
    id: str
    title: str
    trade: str
    born: int
    birthplace: Town
    teacher: Person | None


@dataclass(frozen=True)
class Work:
    id: str
    title: str
    kind: str
    year: int
    maker: Person
    shown: Town  # where it was first shown


Page = Town | Person | Work


@dataclass(frozen=True)
class Corpus:
    towns: tuple[Town, ...]
    people: tuple[Person, ...]
    works: tuple[Work, ...]

    @property
    def pages(self) -> tuple[Page, ...]:
        return (*self.towns, *self.people, *self.works)


def draw_corpus(number: int) -> Corpus:
    """The corpus of this number. Titles are unique within it."""
    rng = random.Random(f"browse/{number}")
    ids = iter(rng.sample(range(100, 1000), TOWNS + PEOPLE + WORKS))
    stems = [start + middle for start in _STARTS for middle in _MIDDLES]
    names = iter(_distinct(rng, TOWNS, lambda: rng.choice(stems) + rng.choice(_TOWN_ENDS)))
    towns = tuple(
        Town(f"P{next(ids)}", next(names), *map(rng.choice, (_REGIONS, _RIVERS, _CRAFTS)), rng.randint(900, 1500))
        for _ in range(TOWNS)
    )
    full = iter(
        _distinct(rng, PEOPLE, lambda: f"{rng.choice(_FIRST_NAMES)} {rng.choice(stems)}{rng.choice(_LAST_ENDS)}")
    )
    people: list[Person] = []
    trades = tuple(MAKERS.values())
    # In the order of their birth: a teacher is older than the pupil.
    for born in sorted(rng.randint(FIRST_YEAR, LAST_YEAR) for _ in range(PEOPLE)):
        trade = rng.choice(trades)
        elders = [person for person in people if person.trade == trade]
        teacher = rng.choice(elders) if elders else None
        people.append(Person(f"P{next(ids)}", next(full), trade, born, rng.choice(towns), teacher))
    titles = iter(rng.sample([f"The {quality} {thing}" for quality in _QUALITIES for thing in _THINGS], WORKS))
    works = []
    for _ in range(WORKS):
        maker = rng.choice(people)
        kind = next(kind for kind, trade in MAKERS.items() if trade == maker.trade)
        year = maker.born + rng.randint(20, 60)
        works.append(Work(f"P{next(ids)}", next(titles), kind, year, maker, rng.choice(towns)))
    return Corpus(towns, tuple(people), tuple(works))


def _distinct(rng: random.Random, count: int, draw) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names[draw()] = None
    return list(names)


def text_of(page: Page) -> str:
    """What a page says. Other pages are named with their id, in brackets."""
    if isinstance(page, Town):
        return (
            f"{page.title} is a town in {page.region}, on the river {page.river}. "
            f"It was founded in {page.founded} and is known for its {page.craft}."
        )
    if isinstance(page, Person):
        text = f"{page.title} was a {page.trade}, born in {page.born} in {_link(page.birthplace)}."
        return text if page.teacher is None else f"{text} Teacher: {_link(page.teacher)}."
    return (
        f"{page.title} is {'an' if page.kind == 'opera' else 'a'} {page.kind} of {page.year} by {_link(page.maker)}. "
        f"It was first shown in {_link(page.shown)}."
    )


def _link(page: Page) -> str:
    return f"{page.title} [{page.id}]"


class Index:
    """Full-text search over the pages of a corpus. May be used from several threads."""

    def __init__(self, corpus: Corpus) -> None:
        self._pages = {page.id: page for page in corpus.pages}
        self._lock = threading.Lock()
        self._rows = sqlite3.connect(":memory:", check_same_thread=False)
        self._rows.execute("CREATE VIRTUAL TABLE pages USING fts5(id UNINDEXED, title, body, tokenize='porter')")
        self._rows.executemany(
            "INSERT INTO pages VALUES (?, ?, ?)", [(page.id, page.title, text_of(page)) for page in corpus.pages]
        )

    def search(self, query: str) -> list[tuple[str, str, str]]:
        """The best pages for any of the words, as ``(id, title, snippet)``; a hit in the title counts three times."""
        words = re.findall(r"\w+", query)
        if not words:
            return []
        match = " OR ".join(f'"{word}"' for word in words[:32])
        with self._lock:
            return self._rows.execute(
                "SELECT id, title, snippet(pages, 2, '', '', '...', ?) FROM pages WHERE pages MATCH ? "
                "ORDER BY bm25(pages, 0.0, 3.0, 1.0), id LIMIT ?",
                (SNIPPET_WORDS, match, RESULTS),
            ).fetchall()

    def page(self, page_id: str) -> str | None:
        """The text of a page, or None where there is no such page."""
        page = self._pages.get(page_id.strip().strip("[]").upper())
        return None if page is None else text_of(page)


@lru_cache(maxsize=8)
def index_of(number: int) -> Index:
    """The index of a corpus, built at its first use."""
    return Index(draw_corpus(number))
