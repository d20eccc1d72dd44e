"""The invented encyclopedia: drawn by number, searchable, and with questions that have one answer each."""

import json
import random
import re
from dataclasses import astuple
from pathlib import Path

import pytest

from actors.envs.browse.corpus import draw_corpus, index_of, text_of
from actors.envs.browse.questions import all_questions, draw_tasks, mark
from actors.task import load_tasks

CORPUS = draw_corpus(1)
QUESTIONS = all_questions(CORPUS)


def test_a_corpus_depends_on_its_number_alone():
    random.seed(0)
    assert draw_corpus(1) == CORPUS
    assert astuple(draw_corpus(2).towns[0]) != astuple(CORPUS.towns[0])


def test_pages_have_ids_and_titles_of_their_own_and_are_short():
    pages = CORPUS.pages
    assert len(pages) == len({page.id for page in pages}) == len({page.title for page in pages}) >= 300
    assert max(len(text_of(page)) for page in pages) < 250


def test_every_link_of_a_page_leads_to_the_page_of_that_title():
    titles = {page.id: page.title for page in CORPUS.pages}
    links = [link for page in CORPUS.pages for link in re.findall(r"(\w+(?: \w+)*) \[(P\d+)\]", text_of(page))]
    assert len(links) > 300
    assert all(before.endswith(titles[page_id]) for before, page_id in links)


def test_a_search_for_a_title_finds_its_page_first():
    index = index_of(1)
    assert all(index.search(page.title)[0][0] == page.id for page in CORPUS.pages)


@pytest.mark.parametrize("query", ['"', "NEAR(", "a OR", "*", "title:x", "", "  ", "é" * 5000, "x " * 500])
def test_no_query_is_a_syntax_error(query):
    assert isinstance(index_of(1).search(query), list)


def test_a_page_is_found_by_its_id_as_a_policy_may_write_it():
    page = CORPUS.towns[0]
    assert {index_of(1).page(written) for written in (page.id, page.id.lower(), f"[{page.id}] ")} == {text_of(page)}
    assert index_of(1).page("P1") is None


def test_the_path_of_a_question_leads_from_link_to_link_to_a_page_with_the_answer():
    for question in QUESTIONS:
        assert 2 <= len(question.path) <= 4
        assert question.path[0].title in question.text
        assert question.answer in text_of(question.path[-1])
        assert not re.search(rf"\b{question.answer}\b", question.text)
        if question.kind != "by_pupil":  # which is found against the links
            for page, following in zip(question.path, question.path[1:], strict=False):
                assert f"[{following.id}]" in text_of(page)


def test_a_question_against_the_links_has_one_answer_only():
    for question in (question for question in QUESTIONS if question.kind == "by_pupil"):
        teacher, _, work = question.path
        fitting = [w for w in CORPUS.works if (w.kind, w.year, w.maker.teacher) == (work.kind, work.year, teacher)]
        assert [w.title for w in fitting] == [question.answer]


def test_a_teacher_is_not_younger_than_the_pupil():
    assert all(person.teacher.born <= person.born for person in CORPUS.people if person.teacher is not None)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("The Silent Harbour", 1.0), ("silent  harbour.", 1.0), ("Sílent Harbour", 1.0), ("Silent", 0.0), ("", 0.0)],
)
def test_an_answer_is_marked_after_normalisation(answer, reward):
    assert mark(answer, "The Silent Harbour") == reward


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_task_files_are_what_the_generator_writes(split):
    path = Path(f"configs/tasks/browse_{split}.json")
    written = json.loads(path.read_text())
    assert written == draw_tasks(split, len(written), seed=1)
    tasks = load_tasks(path)
    assert len(tasks) == len(written) and {task.difficulty for task in tasks} == {2, 3, 4}
    assert not any(task.verifier_code for task in tasks)


def test_held_out_questions_are_about_another_encyclopedia():
    number = {split: {t["openenv_reset"]["corpus"] for t in draw_tasks(split, 20, 1)} for split in ("train", "heldout")}
    assert not number["train"] & number["heldout"]
    assert {text_of(page) for page in CORPUS.pages}.isdisjoint(text_of(page) for page in draw_corpus(2).pages)
