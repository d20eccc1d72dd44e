"""Messages that travel together."""

import asyncio
import contextvars

import pytest

from actors.coalescer import Coalescer


class Receiver:
    """Doubles numbers, one call at a time and only when told to; refuses odd ones."""

    def __init__(self):
        self.calls = []
        self.may_answer = asyncio.Event()

    async def __call__(self, items):
        self.calls.append(list(items))
        await self.may_answer.wait()
        if 13 in items:
            raise ConnectionError("lost")
        return [ValueError(f"{item} is odd") if item % 2 else 2 * item for item in items]


async def test_what_comes_while_a_call_is_under_way_travels_together_in_order():
    receiver = Receiver()
    send = Coalescer(receiver)
    tasks = [asyncio.create_task(send(0))]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(send(item)) for item in (2, 4, 6)]
    await asyncio.sleep(0)
    receiver.may_answer.set()
    assert await asyncio.gather(*tasks) == [0, 4, 8, 12]
    assert receiver.calls == [[0], [2, 4, 6]]
    assert await send(8) == 16 and receiver.calls[-1] == [8]


async def test_an_error_is_for_its_sender_only_unless_the_call_itself_failed():
    receiver = Receiver()
    receiver.may_answer.set()
    send = Coalescer(receiver)
    answers = await asyncio.gather(*(send(item) for item in (2, 3, 4)), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["4", "3 is odd", "8"]
    assert {type(a) for a in await asyncio.gather(*map(send, (13, 2)), return_exceptions=True)} == {ConnectionError}
    assert await send(2) == 4


async def test_too_few_answers_are_everybodys_error_and_later_items_still_travel():
    answers = [[1], [1, 2]]

    async def receiver(items):
        return answers.pop(0)

    send = Coalescer(receiver)
    failed = await asyncio.gather(send("a"), send("b"), return_exceptions=True)
    assert [str(error) for error in failed] == ["1 answers came for 2 items"] * 2
    assert await asyncio.gather(send("c"), send("d")) == [1, 2]


async def test_what_its_sender_gave_up_is_not_sent():
    receiver = Receiver()
    send = Coalescer(receiver)
    first, given_up, last = (asyncio.create_task(send(item)) for item in (0, 2, 4))
    await asyncio.sleep(0)
    given_up.cancel()
    receiver.may_answer.set()
    assert await asyncio.gather(first, last) == [0, 8]
    with pytest.raises(asyncio.CancelledError):
        await given_up
    assert sorted(sum(receiver.calls, [])) == [0, 4]


async def test_calls_are_made_in_no_ones_context():
    variable = contextvars.ContextVar("task", default="nobody")
    seen = []

    async def send(items):
        seen.append(variable.get())
        return items

    variable.set("a task that may be cancelled")
    assert await Coalescer(send)(1) == 1
    assert seen == ["nobody"]
