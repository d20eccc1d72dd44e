"""What two versions of a data set share that they should not.

A task that changed sides was trained on and is now held out, or the other way round. So was, in effect, a task whose
prompt says nearly the same as one of the other side. Near-duplicates are found by MinHash (Broder 1997) over runs of
words and locality-sensitive hashing (Leskovec, Rajaraman, Ullman, "Mining of Massive Datasets", chapter 3). What is
found is checked by the exact Jaccard similarity, so none is reported wrongly; now and then a pair is missed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rensa import RMinHash, RMinHashLSH

from actors.config import Section

SHINGLE_WORDS = 3
PERMUTATIONS = 128
SEED = 1
AT_ONCE = 2000  # texts whose shingles are in memory
LISTED = 10_000  # pairs
FOUND_FROM = 0.95  # least probability that a pair at the wanted similarity is found

_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class PreparedTasks:
    """Prompts by task key, of each side."""

    train: dict[str, str]
    eval: dict[str, str]


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt of one side; ``version``: the data set it is in, ``old``, ``new`` or ``both``."""

    task_key: str
    version: str
    prompt: str


class NearDuplicate(Section):
    """A prompt that was, or is, trained on and nearly equals a held-out one; ``similarity`` is Jaccard's."""

    train_key: str
    eval_key: str
    train_version: str
    eval_version: str
    similarity: float


class Comparison(Section):
    """Task keys that changed sides, came, or went; and near-duplicates across the sides.

    Attributes:
        similarity: from where on two prompts count as near-duplicates.
        pairs: how many there are; ``near_duplicates`` holds the ``LISTED`` most similar ones.
        eval_tasks: how many held-out tasks have at least one.
    """

    train_to_eval: tuple[str, ...]
    eval_to_train: tuple[str, ...]
    added: int
    removed: int
    similarity: float
    pairs: int
    eval_tasks: int
    near_duplicates: tuple[NearDuplicate, ...]


def compare(old: PreparedTasks, new: PreparedTasks, similarity: float) -> Comparison:
    """Compare two versions of a data set.

    Near-duplicates are looked for between everything either version trains on and everything either holds out, tasks
    of the same key aside.

    Args:
        similarity: least Jaccard similarity of two prompts' runs of ``SHINGLE_WORDS`` words, in (0, 1].
    """
    before, after = old.train.keys() | old.eval.keys(), new.train.keys() | new.eval.keys()
    train, held_out = _texts(old.train, new.train), _texts(old.eval, new.eval)
    pairs = near_duplicates(train, held_out, similarity)
    return Comparison(
        train_to_eval=tuple(sorted(old.train.keys() & new.eval.keys())),
        eval_to_train=tuple(sorted(old.eval.keys() & new.train.keys())),
        added=len(after - before),
        removed=len(before - after),
        similarity=similarity,
        pairs=len(pairs),
        eval_tasks=len({held.task_key for _, _, held in pairs}),
        near_duplicates=tuple(
            NearDuplicate(
                train_key=trained.task_key,
                eval_key=held.task_key,
                train_version=trained.version,
                eval_version=held.version,
                similarity=round(found, 4),
            )
            for found, trained, held in pairs[:LISTED]
        ),
    )


def near_duplicates(
    train: Sequence[Text], held_out: Sequence[Text], similarity: float
) -> list[tuple[float, Text, Text]]:
    """Pairs of prompts of different tasks, one of each side, that are at least this similar; the most similar first."""
    index = RMinHashLSH(similarity, PERMUTATIONS, _bands(similarity))
    for start, sketches in _sketches(held_out):
        index.insert_many(sketches, start)
    found = []
    for start, sketches in _sketches(train):
        for trained, places in zip(train[start : start + AT_ONCE], index.query_all(sketches), strict=True):
            runs = shingles(trained.prompt)
            for held in (held_out[place] for place in places):
                exact = jaccard(runs, shingles(held.prompt))
                if trained.task_key != held.task_key and exact >= similarity:
                    found.append((exact, trained, held))
    return sorted(found, key=lambda pair: (-pair[0], pair[1].task_key, pair[2].task_key))


def shingles(text: str) -> set[str]:
    """Every run of ``SHINGLE_WORDS`` words, without case and punctuation; of a shorter text, the text."""
    words = _WORD.findall(text.lower())
    runs = range(max(1, len(words) - SHINGLE_WORDS + 1))
    return {" ".join(words[start : start + SHINGLE_WORDS]) for start in runs}


def jaccard(one: set[str], other: set[str]) -> float:
    """Size of the intersection over that of the union, of two sets that are not both empty."""
    return len(one & other) / len(one | other)


def _texts(old: dict[str, str], new: dict[str, str]) -> list[Text]:
    """The prompts of one side in both versions, each text of a task once."""
    texts = [Text(key, "both" if old.get(key) == prompt else "new", prompt) for key, prompt in new.items()]
    return texts + [Text(key, "old", prompt) for key, prompt in old.items() if new.get(key) != prompt]


def _sketches(texts: Sequence[Text]) -> Iterator[tuple[int, list[RMinHash]]]:
    """MinHash sketches of a part of the texts at a time, and where the part begins."""
    for start in range(0, len(texts), AT_ONCE):
        sets = [sorted(shingles(text.prompt)) for text in texts[start : start + AT_ONCE]]
        yield start, RMinHash.from_token_sets(sets, PERMUTATIONS, SEED)


def _bands(similarity: float) -> int:
    """The fewest bands, a divisor of ``PERMUTATIONS``, that find a pair of this similarity with ``FOUND_FROM``.

    A pair is found if its sketches agree on all rows of at least one band: 1 - (1 - similarity^rows)^bands.
    """
    divisors = [bands for bands in range(1, PERMUTATIONS) if PERMUTATIONS % bands == 0]
    enough = (b for b in divisors if 1 - (1 - similarity ** (PERMUTATIONS // b)) ** b >= FOUND_FROM)
    return next(enough, PERMUTATIONS)
