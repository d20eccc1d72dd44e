"""Which route new weights take, who is in the group of a broadcast, and what that group does."""

import multiprocessing
import time

import pytest
import torch

from serve.side_thread import in_thread
from serve.weight_group import join_group, listener
from serve.weight_routes import Invitation, Member, RouteError, choose_route, depends_on_members, group_ranks

A, B, C = "GPU-a", "GPU-b", "GPU-c"


def members(*gpus_of_each):
    return [Member(f"replica{i}", tuple(gpus), 0) for i, gpus in enumerate(gpus_of_each)]


@pytest.mark.parametrize(
    ("learner", "engines", "route"),
    [
        ([None], [[None], [None]], "snapshot"),  # no GPU anywhere
        ([None], [[A]], "snapshot"),  # a learner without one
        ([A], [[None]], "snapshot"),
        ([A], [[B]], "nccl"),
        ([A], [[B], [C]], "nccl"),
        ([A, B], [[C]], "nccl"),
        ([A, B], [[B]], "ipc"),
        ([A], [[A]], "ipc"),
        ([A], [[A], [A]], "ipc"),  # two small engines on one GPU
        ([A, B], [[A], [B]], "ipc"),
        ([A, B], [[A, B]], "ipc"),  # one engine over two GPUs
        ([A], [[A], [B]], "snapshot"),  # neither all shared nor all apart
        ([A], [[B], [B]], "snapshot"),  # NCCL takes a GPU once
        ([A, B], [[B], [C]], "nccl"),  # only rank 0 sends
        ([A], [], "snapshot"),  # nobody is there
    ],
)
def test_auto_takes_the_fastest_route_that_the_placement_allows(learner, engines, route):
    assert choose_route("auto", learner, members(*engines)) == route


@pytest.mark.parametrize("setting", ["auto", "snapshot", "nccl", "ipc"])
@pytest.mark.parametrize("learner", [[None], [A], [A, B]])
def test_the_roll_is_called_wherever_its_answer_can_matter(setting, learner):
    rolls = [members(*gpus) for gpus in ([], [[None]], [[A]], [[B]], [[C]], [[A], [B]])]
    routes = set()
    for roll in rolls:
        try:
            routes.add(choose_route(setting, learner, roll))
        except RouteError:
            routes.add("refused")
    assert depends_on_members(setting, learner) == (routes != {"snapshot"})


@pytest.mark.parametrize(
    ("setting", "learner", "engines", "reason"),
    [
        ("ipc", [A], [[A], [B]], "1 of 2 engine workers share no GPU with a rank of the learner"),
        ("ipc", [None], [[None]], "1 of 1 engine workers share no GPU"),
        ("nccl", [A], [[A]], "rank 0 of the learner and the engine workers need a GPU each"),
        ("nccl", [A], [[B], [B]], "need a GPU each"),
        ("nccl", [None], [[A]], "must all have a GPU, or none"),
    ],
)
def test_a_route_that_the_placement_rules_out_is_an_error_that_says_why(setting, learner, engines, reason):
    with pytest.raises(RouteError, match=f"policy.weight_transfer {setting} is not possible: .*{reason}.*auto"):
        choose_route(setting, learner, members(*engines))


def test_a_configured_route_is_taken():
    assert choose_route("snapshot", [A], members([A])) == "snapshot"
    assert choose_route("nccl", [None], members([None], [None])) == "nccl"  # over gloo
    assert choose_route("nccl", [A], members([B])) == "nccl"
    assert choose_route("ipc", [A, B], members([A], [B])) == "ipc"
    assert choose_route("ipc", [A], []) == "snapshot"


def test_each_worker_of_each_replica_has_its_own_rank_whatever_order_they_answer_in():
    roll = [Member("z", (A, B), 1), Member("a", (C,), 1), Member("m", (None, None, None), 1)]
    offsets, size = group_ranks(roll)
    ranks = [offsets[member.replica] + worker for member in roll for worker in range(len(member.gpus))]
    assert sorted([0, *ranks]) == list(range(size))
    assert group_ranks(reversed(roll)) == (offsets, size)


def take_part(invitation, rank, results):
    """A worker: joins, receives two broadcasts, says what came."""
    try:
        group = join_group(invitation, rank, torch.device("cpu"))
        received = []
        for _ in range(2):
            data = torch.zeros(1000, dtype=torch.uint8)
            group.broadcast(data)
            received.append(data.tolist())
        results.put((rank, received))
    except RuntimeError as error:
        results.put((rank, str(error)))


def invitation_for(opened, size, timeout_s, epoch=7):
    return Invitation(epoch, "127.0.0.1", opened.getsockname()[1], {}, size, timeout_s)


def test_a_broadcast_reaches_every_worker_of_the_group():
    opened, results = listener("127.0.0.1"), multiprocessing.Queue()
    invitation = invitation_for(opened, 3, timeout_s=60)
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=take_part, args=(invitation, rank, results)) for rank in (1, 2)]
    for worker in workers:
        worker.start()
    try:
        group = join_group(invitation, 0, torch.device("cpu"), opened)
        sent = [torch.randint(0, 255, (1000,), dtype=torch.uint8) for _ in range(2)]
        for data in sent:
            group.broadcast(data)
        received = dict(results.get(timeout=60) for _ in workers)
        assert received == {rank: [data.tolist() for data in sent] for rank in (1, 2)}
        assert group.epoch == 7
        group.abort()
        group.abort()
    finally:
        for worker in workers:
            worker.kill()
            worker.join(10)


def test_a_group_that_does_not_come_about_ends_in_time():
    opened = listener("127.0.0.1")
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        join_group(invitation_for(opened, 2, timeout_s=1.0), 0, torch.device("cpu"), opened)
    assert time.monotonic() - began < 20


def test_what_goes_wrong_in_a_thread_is_handed_to_whoever_asks():
    assert in_thread(lambda value: value + 1, 1).result(10) == 2
    with pytest.raises(ZeroDivisionError):
        in_thread(lambda: 1 // 0).result(10)
