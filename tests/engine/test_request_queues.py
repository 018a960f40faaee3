"""The order laws of the waiting queues, on random comings and goings."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.engine.core.fair import LANE_WEIGHTS, MAX_REMEMBERED, FairRequestQueue
from inferd.engine.core.policy import QUEUES, make_queue
from inferd.engine.core.queue import FCFSRequestQueue, PriorityRequestQueue
from inferd.engine.messages import LANES, AddRequest
from inferd.engine.params import SamplingParams
from inferd.engine.request import Request


class Arrivals:
    """Makes requests as the scheduler hands them to a queue: numbered in order of arrival."""

    def __init__(self):
        self.count = 0

    def make(self, num_tokens=4, **fields):
        self.count += 1
        add = AddRequest(f"r{self.count}", [1] * num_tokens, SamplingParams(), 0.0, **fields)
        request = Request(add, seed=0, max_tokens=8)
        request.number = self.count
        return request


def take_all(queue):
    taken = []
    while len(queue):
        taken.append(queue.peek())
        queue.take(taken[-1])
    return taken


def names(requests):
    return [request.request_id for request in requests]


# What may happen to a queue, as (what, which): the latter picks among those it can happen to.
happenings = st.lists(
    st.tuples(st.sampled_from(["add", "add", "take", "preempt", "remove", "finish"]), st.integers(0, 99)), max_size=60
)


def play(queue, events, make):
    """Let it all happen; after each event, who waits. Preempted is always who was taken last, as the scheduler does."""
    running, history = [], []
    for what, which in events:
        waiting = sorted(queue, key=lambda request: request.number)
        if what == "add":
            queue.add(make(which))
        elif what == "take" and waiting:
            running.append(queue.peek())
            queue.take(running[-1])
        elif what == "preempt" and running:
            queue.prepend(running.pop())
        elif what == "remove" and waiting:
            queue.remove(waiting[which % len(waiting)].request_id)
        elif what == "finish" and running:
            queue.release(running.pop(which % len(running)))
        assert len(queue) == len(names(queue))
        history.append(names(queue))
    return history


@given(happenings)
def test_first_come_first_served_is_a_list(events):
    expected, running = [], []
    queue, arrivals = FCFSRequestQueue(), Arrivals()
    history = play(queue, events, lambda _: arrivals.make())
    arrived = itertools.count(1)
    for (what, which), now in zip(events, history, strict=True):
        if what == "add":
            expected.append(f"r{next(arrived)}")
        elif what == "take" and expected:
            running.append(expected.pop(0))
        elif what == "preempt" and running:
            expected.insert(0, running.pop())
        elif what == "remove" and expected:
            expected.remove(sorted(expected, key=lambda name: int(name[1:]))[which % len(expected)])
        elif what == "finish" and running:
            running.pop(which % len(running))
        assert now == expected


@given(happenings)
def test_one_client_is_served_in_order_of_arrival_by_every_policy(events):
    histories = []
    for policy in QUEUES:
        arrivals = Arrivals()
        histories.append(play(make_queue(policy), events, lambda _, arrivals=arrivals: arrivals.make()))
    assert histories[0] == histories[1] == histories[2]


@given(happenings)
def test_priority_goes_before_arrival(events):
    arrivals, queue = Arrivals(), PriorityRequestQueue()
    play(queue, events, lambda which: arrivals.make(priority=which % 3))
    listed = list(queue)
    taken = take_all(queue)
    assert taken == listed == sorted(taken, key=lambda request: (request.priority, request.number))


def test_an_id_may_come_again_while_its_old_place_is_still_in_the_heap():
    queue, arrivals = PriorityRequestQueue(), Arrivals()
    first, second = arrivals.make(), arrivals.make()
    for request in (first, second):
        queue.add(request)
    queue.remove("r1")
    again = arrivals.make()
    again.request_id = "r1"
    queue.add(again)
    assert take_all(queue) == [second, again]


def test_those_that_left_do_not_pile_up():
    queue, arrivals = PriorityRequestQueue(), Arrivals()
    queue.add(arrivals.make(priority=-1))
    for _ in range(2000):
        request = arrivals.make()
        queue.add(request)
        queue.remove(request.request_id)
    assert len(queue._heap) < 100


@pytest.mark.parametrize("policy", QUEUES)
def test_an_empty_queue_and_unknown_requests_are_errors(policy):
    queue, arrivals = make_queue(policy), Arrivals()
    with pytest.raises(IndexError, match="no request is waiting"):
        queue.peek()
    with pytest.raises(KeyError):
        queue.remove("r1")
    with pytest.raises(KeyError):
        queue.take(arrivals.make())


loads = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(LANES), st.integers(1, 300)), max_size=30)


@given(loads)
def test_the_listed_order_is_the_order_of_admission(load):
    queue, arrivals = FairRequestQueue(), Arrivals()
    for client, lane, num_tokens in load:
        queue.add(arrivals.make(num_tokens, client=client, lane=lane))
    listed = list(queue)
    assert take_all(queue) == listed
    assert len(listed) == len(load)


@given(loads, st.integers(0, 30), st.integers(1, 300))
def test_a_newcomer_waits_for_at_most_one_request_of_each_other_client(load, num_taken_before, num_tokens):
    """However much the others have waiting, and whatever they were served before."""
    queue, arrivals = FairRequestQueue(), Arrivals()
    for client, _, tokens in load:
        queue.add(arrivals.make(tokens, client=client))
    for _ in range(min(num_taken_before, len(load))):
        queue.take(queue.peek())
    newcomer = arrivals.make(num_tokens, client="new")
    queue.add(newcomer)
    before = Counter(request.client for request in itertools.takewhile(lambda r: r is not newcomer, take_all(queue)))
    assert all(count <= 1 for count in before.values())


@settings(max_examples=50)
@given(st.lists(st.integers(1, 200), min_size=200, max_size=200), st.randoms(use_true_random=False))
def test_lanes_share_by_weight_and_clients_alike(sizes, random):
    """With work waiting everywhere, nobody is ahead by more than the largest request, outputs included."""
    queue, arrivals = FairRequestQueue(), Arrivals()
    flows = [("interactive", "a"), ("interactive", "b"), ("batch", "a"), ("batch", "c")]
    served = Counter()
    for lane, client in flows:
        for size in sizes:
            queue.add(arrivals.make(size, lane=lane, client=client))
    for _ in range(150):
        request = queue.peek()
        queue.take(request)
        output = random.randrange(40)
        request.num_computed_tokens = request.num_tokens + output
        queue.release(request)
        served[request.lane, request.client] += request.num_tokens + output
    largest = max(sizes) + 40
    interactive = served["interactive", "a"] + served["interactive", "b"]
    batch = served["batch", "a"] + served["batch", "c"]
    assert abs(served["interactive", "a"] - served["interactive", "b"]) <= largest
    assert abs(served["batch", "a"] - served["batch", "c"]) <= largest
    assert abs(interactive / LANE_WEIGHTS["interactive"] - batch / LANE_WEIGHTS["batch"]) <= largest


class TestFairness:
    def test_output_counts_while_it_is_generated(self):
        queue, arrivals = FairRequestQueue(), Arrivals()
        talker, quiet = arrivals.make(4, client="talker"), arrivals.make(4, client="quiet")
        for request in (talker, quiet):
            queue.add(request)
            queue.take(request)
        queue.add(arrivals.make(4, client="talker"))
        queue.add(arrivals.make(4, client="quiet"))
        assert queue.peek().client == "talker"  # both were served alike, and it came first
        talker.num_computed_tokens = 30
        assert queue.peek().client == "quiet"

    def test_cached_tokens_and_what_is_computed_again_are_free(self):
        queue, arrivals = FairRequestQueue(), Arrivals()
        request, other = arrivals.make(100, client="a"), arrivals.make(30, client="b")
        queue.add(request)
        request.num_computed_tokens = 90  # found in the cache
        queue.take(request)
        request.num_computed_tokens = 110
        queue.prepend(request)
        request.num_computed_tokens = 0
        queue.take(request)  # a was served 20 now
        queue.add(other)
        queue.take(other)  # and b 30, starting from there
        queue.add(arrivals.make(client="b"))
        queue.add(arrivals.make(client="a"))
        assert queue.peek().client == "a"
        request.num_computed_tokens = 110
        assert queue.peek().client == "a"
        request.num_computed_tokens = 150
        assert queue.peek().client == "b"

    def test_nobody_saves_up_by_being_away(self):
        queue, arrivals = FairRequestQueue(), Arrivals()
        for _ in range(20):
            queue.add(arrivals.make(50, client="busy"))
        for _ in range(10):
            queue.take(queue.peek())
        for _ in range(5):
            queue.add(arrivals.make(50, client="back"))
        assert [request.client for request in take_all(queue)][:4] == ["back", "busy", "back", "busy"]

    def test_a_clients_own_requests_go_by_priority(self):
        queue, arrivals = FairRequestQueue(), Arrivals()
        late = arrivals.make(priority=5)
        queue.add(late)
        urgent = arrivals.make(priority=-1)
        queue.add(urgent)
        queue.add(arrivals.make(client="other"))
        assert [r.client for r in take_all(queue)] == ["local", "other", "local"]

    def test_interactive_requests_may_take_the_place_of_batch_ones(self):
        queue, arrivals = FairRequestQueue(), Arrivals()
        batch, interactive = arrivals.make(lane="batch"), arrivals.make()
        assert queue.standing(interactive) < queue.standing(batch)
        assert not queue.outranks(batch)
        queue.add(interactive)
        assert queue.outranks(batch)
        assert not queue.outranks(arrivals.make())

    def test_clients_that_are_gone_are_forgotten(self):
        queue, arrivals = FairRequestQueue(), Arrivals()
        for index in range(3 * MAX_REMEMBERED):
            request = arrivals.make(4, client=f"client-{index}")
            queue.add(request)
            queue.take(request)
            queue.release(request)
        assert len(queue._lanes["interactive"].clients) <= MAX_REMEMBERED


class TestSetAside:
    @pytest.mark.parametrize("policy", QUEUES)
    def test_it_comes_back_to_its_place(self, policy):
        queue, arrivals = make_queue(policy), Arrivals()
        requests = [arrivals.make() for _ in range(5)]
        for request in requests:
            queue.add(request)
        before = names(queue)
        queue.set_aside(requests[1])
        assert names(queue) == [name for name in before if name != "r2"]
        assert len(queue) == 4
        queue.add_back(requests[1])
        assert names(queue) == before
        assert names(take_all(queue)) == before

    @pytest.mark.parametrize("policy", ["fair", "priority"])
    @pytest.mark.parametrize(("priority", "place"), [(-1, 0), (1, 4)])
    def test_with_another_priority_it_has_another_place(self, policy, priority, place):
        queue, arrivals = make_queue(policy), Arrivals()
        requests = [arrivals.make() for _ in range(5)]
        for request in requests:
            queue.add(request)
        queue.set_aside(requests[2])
        requests[2].priority = priority
        queue.add_back(requests[2])
        assert names(queue).index("r3") == place
        assert names(take_all(queue)).index("r3") == place

    def test_what_a_client_was_served_is_not_counted_again(self):
        queue, arrivals = FairRequestQueue(), Arrivals()
        request = arrivals.make(40, client="ann")
        queue.add(request)
        queue.take(request)
        request.num_computed_tokens = 40
        queue.prepend(request)  # preempted
        request.num_computed_tokens = 0
        queue.set_aside(request)
        queue.add_back(request)
        queue.take(request)
        assert queue._lanes["interactive"].clients["ann"].served == 40
