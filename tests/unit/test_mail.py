"""Mail keeps its rules: everybody sees their own mail only, and what is sent arrives in the right thread."""

import re

import pytest

from actors.envs.local_fleet.application import ToolError
from actors.envs.local_fleet.apps import APPLICATIONS
from actors.envs.local_fleet.apps.problems import open_database

MAIL = APPLICATIONS["mail"]
TOOLS = {tool.name: tool for tool in MAIL.tools}


@pytest.fixture
def company():
    connection = open_database(MAIL, "firm", "s1")
    yield connection
    connection.close()


def call(company, name, user="mia", **arguments):
    return TOOLS[name].call(company, arguments, {"LOGGED_IN_USER": user, "CURRENT_DATE": "2026-01-12"})


def send(company, user="ana", to="mia", subject="board talk", text="number 7"):
    return call(company, "send_mail", user=user, to=to, subject=subject, text=text)["id"]


def test_a_mail_arrives_is_read_and_answered_in_its_thread(company):
    sent = send(company)
    found = call(company, "search_mail", query="BOARD")
    thread = found["messages"][0][1]
    assert found == {"n": 1, "messages": [[sent, thread, "ana", "board talk", "none", 1]]}
    assert call(company, "read_mail", id=sent)["body"] == "number 7"
    assert call(company, "search_mail", query="board")["messages"][0][5] == 0, "read"
    answer = call(company, "reply_mail", id=sent, text="thanks")["id"]
    expected = [[sent, "ana", "mia", "board talk", "number 7"], [answer, "mia", "ana", "Re: board talk", "thanks"]]
    assert call(company, "read_thread", thread=thread)["messages"] == expected
    again = call(company, "reply_mail", user="ana", id=answer, text="you are welcome")["id"]
    assert call(company, "read_mail", id=again)["subject"] == "Re: board talk"
    assert [row[0] for row in call(company, "search_mail", folder="sent", query="board")["messages"]] == [answer]


def test_labels_the_archive_and_forwarding(company):
    sent = send(company)
    call(company, "label_mail", id=sent, label="urgent")
    assert [row[0] for row in call(company, "search_mail", label="urgent")["messages"]] == [sent]
    call(company, "archive_mail", id=sent)
    assert call(company, "search_mail", query="board")["n"] == 0
    assert call(company, "search_mail", query="board", folder="archive")["n"] == 1
    call(company, "forward_mail", id=sent, to="ben")
    ((_, _, sender, subject, _, unread),) = call(company, "search_mail", user="ben", query="board")["messages"]
    assert (sender, subject, unread) == ("mia", "Fwd: board talk", 1)


def test_nobody_sees_the_mail_of_others(company):
    sent = send(company)
    thread = call(company, "read_mail", id=sent)["thread"]
    assert call(company, "search_mail", user="eva", query="board")["n"] == 0
    for name, arguments in (
        ("read_mail", {"id": sent}), ("reply_mail", {"id": sent, "text": "x"}), ("archive_mail", {"id": sent}),
        ("forward_mail", {"id": sent, "to": "ben"}), ("read_thread", {"thread": thread}),
    ):  # fmt: skip
        with pytest.raises(ToolError, match="^no (message|thread) "):
            call(company, name, user="eva", **arguments)


def test_contacts_are_found_by_name_and_city(company):
    everybody = call(company, "find_contact")["contacts"]
    assert len(everybody) == 8
    assert call(company, "find_contact", query=everybody[3][3].lower())["contacts"] == [everybody[3]]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("read_mail", {"id": "M999"}, "no message M999"),
        ("read_thread", {"thread": "H999"}, "no thread H999"),
        ("send_mail", {"to": "zoe", "subject": "x", "text": "y"}, "no contact zoe"),
        ("send_mail", {"to": "ana", "subject": " ", "text": "y"}, "subject must not be empty"),
        ("send_mail", {"to": "ana", "text": "y"}, "missing argument subject"),
        ("label_mail", {"id": "M10", "label": "red"}, "label must be one of none, urgent"),
        ("search_mail", {"sender": "zoe"}, "no contact zoe"),
        ("search_mail", {"folder": "spam"}, "folder must be one of inbox, archive, sent"),
    ],
)
def test_a_wrong_call_is_refused_with_a_reason_and_changes_nothing(company, name, arguments, message):
    before = list(company.iterdump())
    with pytest.raises(ToolError, match=re.escape(message)):
        call(company, name, **arguments)
    assert list(company.iterdump()) == before


def test_a_sent_mail_cannot_be_labelled_and_an_archived_one_not_archived_again(company):
    sent = send(company)
    with pytest.raises(ToolError, match="only received mail"):
        call(company, "label_mail", user="ana", id=sent, label="team")
    call(company, "archive_mail", id=sent)
    with pytest.raises(ToolError, match="archived already"):
        call(company, "archive_mail", id=sent)
