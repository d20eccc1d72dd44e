"""Questions about a corpus whose answers take two to four pages, and how an answer is marked.

``python -m actors.envs.browse.questions --out-dir configs/tasks`` writes ``browse_train.json`` and
``browse_heldout.json``. Held-out questions are about another corpus: none of its facts can be known from training.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.envs.browse.corpus import MAKERS, Corpus, Page, Work, draw_corpus

ENV_KEY = "browse"
CORPORA = {"train": 1, "heldout": 2}


@dataclass(frozen=True)
class Question:
    """A question, its one right answer, and the pages that lead from the one to the other."""

    kind: str
    text: str
    answer: str
    path: tuple[Page, ...]

    def task(self, task_key: str, corpus: int) -> dict[str, Any]:
        """The question in the project's task format."""
        return {
            "task_key": task_key,
            "prompt": f"{self.text} Search, open pages, and submit the answer with the tool answer.",
            "env_key": ENV_KEY,
            "openenv_reset": {"corpus": corpus, "answer": self.answer},
            "openenv_answer_tool": "answer",
            "task_modality": "tool_use",
            "difficulty": len(self.path),
            "kind": self.kind,
        }


def normalise(answer: str) -> str:
    """An answer without what does not count: case, accents, punctuation, articles, spaces."""
    plain = unicodedata.normalize("NFKD", answer).encode("ascii", "ignore").decode().lower()
    words = re.sub(r"[^a-z0-9]+", " ", plain).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def mark(answer: str, expected: str) -> float:
    """1.0 for the expected answer, normalised, and 0.0 for anything else."""
    return float(normalise(answer) == normalise(expected))


def all_questions(corpus: Corpus) -> list[Question]:
    """Every question the corpus has an unambiguous answer to, in a fixed order."""
    pupils = Counter((work.kind, work.maker.teacher, work.year) for work in corpus.works)
    questions: list[Question] = []
    for work in corpus.works:
        questions += _about(work)
        if work.maker.teacher is not None and pupils[work.kind, work.maker.teacher, work.year] == 1:
            questions.append(_of_a_pupil(work))
    return questions


def _about(work: Work) -> Iterator[Question]:
    the_work, maker, teacher = f"the {work.kind} {work.title}", work.maker, work.maker.teacher
    trade, home = MAKERS[work.kind], work.maker.birthplace
    yield Question("birthplace", f"In which town was the {trade} of {the_work} born?", home.title, (work, maker))
    yield Question(
        "shown_river", f"On which river lies the town where {the_work} was first shown?", work.shown.river,
        (work, work.shown),
    )  # fmt: skip
    yield Question(
        "home_craft", f"What is the birthplace of the {trade} of {the_work} known for?", home.craft, (work, maker, home)
    )
    if teacher is not None:
        yield Question(
            "teacher_born", f"In which year was the teacher of the {trade} of {the_work} born?", str(teacher.born),
            (work, maker, teacher),
        )  # fmt: skip
        yield Question(
            "teacher_region", f"In which region was the teacher of the {trade} of {the_work} born?",
            teacher.birthplace.region, (work, maker, teacher, teacher.birthplace),
        )  # fmt: skip


def _of_a_pupil(work: Work) -> Question:
    teacher = work.maker.teacher
    text = f"Which {work.kind} of {work.year} is by a pupil of {teacher.title}?"
    return Question("by_pupil", text, work.title, (teacher, work.maker, work))


def draw_tasks(split: str, count: int, seed: int) -> list[dict[str, Any]]:
    """``count`` different tasks of a split (``train`` or ``heldout``), all kinds alike often as far as they reach."""
    number = CORPORA[split]
    questions = all_questions(draw_corpus(number))
    rng = random.Random(f"browse/questions/{split}/{seed}")
    rng.shuffle(questions)
    seen: Counter[str] = Counter()
    rounds = []
    for question in questions:
        rounds.append((seen[question.kind], len(rounds), question))
        seen[question.kind] += 1
    chosen = [question for _, _, question in sorted(rounds, key=lambda item: item[:2])[:count]]
    return [q.task(f"browse_{split}_{index:04d}_{q.kind}", number) for index, q in enumerate(chosen)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m actors.envs.browse.questions", description="Write task files.")
    parser.add_argument("--train", type=int, default=256, help="tasks (default: %(default)s)")
    parser.add_argument("--heldout", type=int, default=64, help="tasks (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out-dir", type=Path, required=True)
    options = parser.parse_args(arguments)
    for split, count in (("train", options.train), ("heldout", options.heldout)):
        tasks = draw_tasks(split, count, options.seed)
        path = options.out_dir / f"browse_{split}.json"
        path.write_text(json.dumps(tasks, indent=1) + "\n", encoding="utf-8")
        print(f"{path}: {len(tasks)} tasks")


if __name__ == "__main__":
    main()
