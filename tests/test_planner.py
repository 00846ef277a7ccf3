"""The planner case by case: order, hedges, quarantine, poison, and its speed in simulated time."""

from __future__ import annotations

import random

import pytest

from draftmill.run.actions import Action, Assign, Deliver, Removed
from draftmill.run.planner import KILLED_TARGET, Planner
from draftmill.wire import Lease
from planner_helpers import Simulation, bound, make_pack, make_packs, rows

NONFINITE = "nonfinite_features"


def ready(planner: Planner, targets: int, now: float = 0.0) -> dict[int, Lease]:
    """The first leases of `targets` targets."""
    for target in range(targets):
        planner.target_ready(target)
    return leases(planner.actions(now))


def leases(actions: list[Action]) -> dict[int, Lease]:
    return {action.target: action.lease for action in actions if isinstance(action, Assign)}


def seqs(actions: list[Action]) -> list[int]:
    return [action.lease.pack.seq for action in actions if isinstance(action, Assign)]


def delivered(actions: list[Action]) -> list[tuple[int, int]]:
    return [(action.drafter, action.seq) for action in actions if isinstance(action, Deliver)]


def practised(planner: Planner, packs: int = 6) -> float:
    """One target has filled `packs` packs in a second each and is gone, all is freed: a second is usual."""
    for now in range(packs):
        planner.target_ready(0)
        lease = leases(planner.actions(float(now)))[0]
        planner.filled(0, lease.lease, now + 1.0)
        planner.target_gone(0)
        (delivery,) = planner.actions(now + 1.0)
        planner.freed(delivery.drafter, delivery.seq, delivery.slot)
    return float(packs)


def test_packs_are_leased_in_order_while_their_drafter_has_a_place():
    planner = Planner(make_packs(9), drafters=2, slots=1)
    first = ready(planner, targets=5)
    assert [lease.pack.seq for lease in first.values()] == [0, 1]  # pack 2 waits for drafter 0
    assert [(lease.drafter, lease.slot) for lease in first.values()] == [(0, 0), (1, 0)]
    planner.filled(1, first[1].lease, now=1.0)
    actions = planner.actions(1.0)
    assert delivered(actions) == [(1, 1)] and seqs(actions) == []
    planner.freed(1, 1, first[1].slot)
    assert planner.actions(1.0) == []  # pack 3 has a place, but pack 2 is before it
    planner.filled(0, first[0].lease, now=1.0)
    assert delivered(planner.actions(1.0)) == [(0, 0)]
    planner.freed(0, 0, first[0].slot)
    actions = planner.actions(1.0)
    assert seqs(actions) == [2, 3]
    assert [action.target for action in actions] == [2, 3]  # the longest idle first


def test_delivery_keeps_the_order_of_each_drafter():
    planner = Planner(make_packs(6), drafters=2, slots=3)
    given = ready(planner, targets=6)
    order = []
    for target in (4, 5, 3, 2, 1, 0):
        planner.filled(target, given[target].lease, now=1.0)
        order.append(delivered(planner.actions(1.0)))
    assert order == [[], [], [], [], [(1, 1), (1, 3), (1, 5)], [(0, 0), (0, 2), (0, 4)]]
    assert planner.counts().held == 6 and not planner.finished
    for target, lease in given.items():
        assert not planner.finished
        planner.freed(lease.drafter, target, lease.slot)
    assert planner.finished


def test_an_overdue_head_is_leased_again_and_the_first_fill_wins():
    planner = Planner(make_packs(8), drafters=1, slots=2)
    now = practised(planner)
    given = ready(planner, 3, now)
    assert [lease.pack.seq for lease in given.values()] == [6, 7] and planner.counts().idle == 1
    planner.filled(1, given[1].lease, now + 1)
    assert planner.actions(now + 1) == [] and planner.next_deadline(now + 1) == now + 3
    assert planner.actions(now + 2.9) == []
    (hedge,) = planner.actions(now + 3)
    assert hedge.lease.pack is given[0].pack and hedge.lease.slot not in (given[0].slot, given[1].slot)
    assert planner.actions(now + 99) == []  # two at most
    planner.filled(hedge.target, hedge.lease.lease, now + 4)
    assert delivered(planner.actions(now + 4)) == [(0, 6), (0, 7)]
    counts = planner.counts()
    assert (counts.hedges, counts.hedges_won, counts.late, counts.working) == (1, 1, 1, 0)
    planner.freed(0, 6, hedge.lease.slot)
    planner.freed(0, 7, given[1].slot)
    assert planner.finished
    planner.filled(0, given[0].lease, now + 50)  # its answer is ignored, it is idle again
    assert planner.actions(now + 50) == [] and planner.counts().late == 0 and planner.counts().idle == 3


@pytest.mark.parametrize("end", ["filled", "rejected", "gone"])
def test_a_late_place_is_quarantined_until_its_writer_answers_or_exits(end):
    planner = Planner(make_packs(20), drafters=1, slots=1)
    now = practised(planner)
    given = ready(planner, 2, now)
    hedge = leases(planner.actions(now + 3))[1]
    planner.filled(1, hedge.lease, now + 4)
    late, used = given[0].slot, set()
    for seq in (6, 7, 8):  # goes on with the other place
        actions = planner.actions(now + 4)
        (delivery,) = [action for action in actions if isinstance(action, Deliver)]
        assert delivery.seq == seq and delivery.slot != late
        planner.freed(0, seq, delivery.slot)
        (assigned,) = leases(planner.actions(now + 4)).values()
        used.add(assigned.slot)
        planner.filled(1, assigned.lease, now + 5)
    assert late not in used
    if end == "filled":
        planner.filled(0, given[0].lease, now + 5)
    elif end == "rejected":
        planner.rejected(0, given[0].lease, [12], NONFINITE, now + 5)
    else:
        planner.target_gone(0)
    actions = planner.actions(now + 5)
    assert delivered(actions) == [(0, 9)] and not any(isinstance(action, Removed) for action in actions)
    planner.freed(0, 9, next(iter(used)))
    assert [lease.slot for lease in leases(planner.actions(now + 5)).values()] == [late]


def test_the_last_place_is_kept_for_an_overdue_head():
    """Two targets hang at once: the second place must not go to a new pack while the head has none to be hedged in."""
    planner = Planner(make_packs(30), drafters=1, slots=2)
    now = practised(planner)
    ready(planner, 3, now)  # 0 and 1 hang with packs 6 and 7
    hedge = leases(planner.actions(now + 3))[2]
    planner.filled(2, hedge.lease, now + 4)
    assert delivered(planner.actions(now + 4)) == [(0, 6)]
    planner.freed(0, 6, hedge.slot)
    (second,) = leases(planner.actions(now + 4)).values()
    assert second.pack.seq == 7 and planner.counts().hedges == 2


def test_only_what_holds_a_line_is_hedged_the_lowest_seq_first():
    planner = Planner(make_packs(10), drafters=2, slots=2)
    now = practised(planner)
    given = ready(planner, 4, now)
    assert [lease.pack.seq for lease in given.values()] == [6, 7, 8, 9]
    planner.filled(0, given[0].lease, now + 1)
    assert delivered(planner.actions(now + 1)) == [(0, 6)]
    planner.freed(0, 6, given[0].slot)
    assert seqs(planner.actions(now + 3)) == [7]  # not 8, though drafter 0 comes first
    planner.target_ready(4)
    planner.target_ready(5)
    assert seqs(planner.actions(now + 3)) == [8]  # and 9 waits behind 7


def test_hedges_that_are_for_nothing_become_rarer_and_come_back():
    planner = Planner(make_packs(200), drafters=1, slots=1)
    now = practised(planner)
    waits = []
    planner.target_ready(0)
    planner.target_ready(1)
    for original_wins in [True] * 9 + [False] * 9:
        (target, lease), *_ = leases(planner.actions(now)).items()
        wait = planner.next_deadline(now) - now
        now += wait
        waits.append(wait)
        ((second, hedge),) = leases(planner.actions(now)).items()
        winner = (target, lease) if original_wins else (second, hedge)
        loser = (second, hedge) if original_wins else (target, lease)
        planner.filled(winner[0], winner[1].lease, now)
        (delivery,) = planner.actions(now)[:1]
        planner.freed(0, delivery.seq, delivery.slot)
        planner.target_gone(loser[0])  # without a service time: only the hedges count here
        planner.target_gone(winner[0])
        planner.target_ready(0)
        planner.target_ready(1)
        planner._pace._recent.clear()  # likewise
    assert waits[:9] == sorted(waits[:9]) and waits[8] > 10 * waits[0]
    assert waits[9:] == sorted(waits[9:], reverse=True) and waits[-1] == pytest.approx(waits[0])


def test_a_lease_comes_back_when_its_target_is_gone_and_goes_first():
    planner = Planner(make_packs(9), drafters=1, slots=3)
    given = ready(planner, targets=3)
    planner.target_gone(2)
    planner.target_gone(0)
    assert planner.actions(0.0) == []
    planner.target_ready(7)
    planner.target_ready(0)
    actions = planner.actions(1.0)
    assert seqs(actions) == [0, 2] and [action.target for action in actions] == [7, 0]
    new = leases(actions)
    assert {lease.lease for lease in new.values()}.isdisjoint(lease.lease for lease in given.values())
    planner.filled(0, given[0].lease, now=1.0)  # by its former self
    assert planner.actions(1.0) == [] and planner.counts().stale == 1 and planner.counts().requeues == 2


def poisoned(planner: Planner, done: int, now: float = 0.0) -> list[Action]:
    """Targets 0, 1, 2 work on the only pack and die; the last one `done` documents into it."""
    for target in range(3):
        lease = ready_one(planner, target, now)
        assert lease.one_by_one == (target == 2)
        for index in range(done if target == 2 else 0):
            planner.document_done(target, lease.lease, index)
        assert planner.actions(now) == []
        planner.target_gone(target)
    return planner.actions(now)


def ready_one(planner: Planner, target: int, now: float) -> Lease:
    planner.target_ready(target)
    return leases(planner.actions(now))[target]


def test_a_pack_that_has_killed_two_is_computed_one_by_one_and_loses_the_guilty_document():
    planner = Planner(iter([make_pack(0, [4, 5, 6], epoch=3)]), drafters=1, slots=2)
    assert poisoned(planner, done=1) == [Removed(0, 3, (5,), KILLED_TARGET)]
    lease = ready_one(planner, 3, 0.0)
    assert rows(lease.pack) == (4, 6) and lease.one_by_one  # there may be another
    with pytest.raises(RuntimeError, match="document 1 of pack 0"):
        planner.document_done(3, lease.lease, 1)
    planner.document_done(3, lease.lease, 0)
    planner.target_gone(3)
    assert planner.actions(0.0) == [Removed(0, 3, (6,), KILLED_TARGET)]
    lease = ready_one(planner, 4, 0.0)
    planner.document_done(4, lease.lease, 0)
    planner.filled(4, lease.lease, now=9.0)
    (delivery,) = planner.actions(9.0)
    assert rows(delivery.pack) == (4,)


def test_a_pack_that_kills_after_its_last_document_fails_as_a_whole():
    """Else it would kill for ever."""
    planner = Planner(iter([make_pack(0, [4, 5])]), drafters=1, slots=1)
    assert poisoned(planner, done=2) == [Removed(0, 0, (4, 5), KILLED_TARGET), Deliver(0, 0, None, None)]
    assert planner.finished


def test_a_suspect_pack_is_not_hedged():
    planner = Planner(make_packs(8), drafters=1, slots=1)
    now = practised(planner)
    for target in range(2):
        ready_one(planner, target, now)
        planner.target_gone(target)
    ready(planner, 2, now)
    assert planner.actions(now + 1000) == []


def test_time_spent_one_by_one_does_not_count_as_service():
    planner = Planner(make_packs(8), drafters=1, slots=1)
    now = practised(planner)
    for target in range(2):
        ready_one(planner, target, now)
        planner.target_gone(target)
    planner.filled(2, ready_one(planner, 2, now).lease, now + 1000)
    assert list(planner._pace._recent) == [1.0] * 6


def test_two_writers_that_die_count_as_two_kills():
    planner = Planner(make_packs(8), drafters=1, slots=1)
    now = practised(planner)
    ready(planner, 2, now)
    planner.actions(now + 3)
    planner.target_gone(0)
    assert planner.actions(now + 3) == [] and planner.counts().requeues == 0  # the other one goes on
    planner.target_gone(1)
    assert ready_one(planner, 0, now + 3).one_by_one


def test_rejected_documents_fail_and_the_pack_goes_on_without_them():
    planner = Planner(make_packs(2, each=3), drafters=1, slots=2)
    given = ready(planner, targets=2)
    planner.filled(1, given[1].lease, now=1.0)
    planner.rejected(0, given[0].lease, [2, 0], NONFINITE, now=1.0)
    actions = planner.actions(1.0)
    assert actions[0] == Removed(0, 0, (0, 2), NONFINITE)
    (lease,) = leases(actions).values()
    assert rows(lease.pack) == (1,) and not lease.one_by_one
    planner.filled(1, lease.lease, now=2.0)
    assert delivered(planner.actions(2.0)) == [(0, 0), (0, 1)]


def test_a_pack_without_documents_left_is_a_micro_step_of_zero_weight():
    planner = Planner(make_packs(3), drafters=1, slots=1)
    lease = ready(planner, targets=1)[0]
    planner.rejected(0, lease.lease, [0, 1], NONFINITE, now=1.0)
    actions = planner.actions(1.0)
    assert actions[:2] == [Removed(0, 0, (0, 1), NONFINITE), Deliver(0, 0, None, None)]
    assert seqs(actions) == [1]  # its place is free without a word from the drafter


def test_a_rejection_makes_the_other_writer_late():
    """It computes a pack that is not wanted any more."""
    planner = Planner(make_packs(8), drafters=1, slots=1)
    now = practised(planner)
    given = ready(planner, 2, now)
    hedge = leases(planner.actions(now + 3))[1]
    planner.rejected(1, hedge.lease, [12], NONFINITE, now + 4)
    removed, again = planner.actions(now + 4)
    assert removed == Removed(6, 0, (12,), NONFINITE) and rows(again.lease.pack) == (13,)
    planner.filled(0, given[0].lease, now + 5)
    assert planner.actions(now + 5) == []
    planner.filled(1, again.lease.lease, now + 5)
    (delivery,) = planner.actions(now + 5)
    assert rows(delivery.pack) == (13,)


def test_packs_that_come_without_documents_need_no_target_but_their_turn():
    packs = [make_pack(0, [0]), make_pack(1, []), make_pack(2, []), make_pack(3, [])]
    planner = Planner(iter(packs), drafters=2, slots=1)
    assert planner.actions(0.0) == []
    lease = ready(planner, targets=1)[0]
    planner.filled(0, lease.lease, 1.0)
    actions = planner.actions(1.0)
    assert delivered(actions) == [(0, 0)]
    assert planner.counts().held == 1  # pack 2 is not taken in before pack 0 is freed
    planner.freed(0, 0, lease.slot)
    assert planner.actions(1.0) == [Deliver(0, 2, None, None), Deliver(1, 3, None, None)]
    assert planner.finished


def test_a_replay_with_the_same_decisions_gives_the_same_packs():
    def run(faults: bool, removed: dict[int, set[int]]) -> tuple[list, dict[int, set[int]], int]:
        planner = Planner(make_packs(6, each=3), 2, 2, removed=removed, first_lease=100)
        planner.target_ready(0)
        given, decided, now = [], {}, 0.0
        while not planner.finished:
            now += 1
            for action in planner.actions(now):
                if isinstance(action, Removed):
                    decided.setdefault(action.seq, set()).update(action.documents)
                elif isinstance(action, Deliver):
                    given.append((action.drafter, action.seq, action.pack and rows(action.pack)))
                    if action.slot is not None:
                        planner.freed(action.drafter, action.seq, action.slot)
                elif faults and action.lease.pack.seq == 3:
                    planner.rejected(0, action.lease.lease, rows(action.lease.pack), NONFINITE, now)
                elif faults and action.lease.pack.seq == 4 and 13 in rows(action.lease.pack):
                    if action.lease.one_by_one:
                        planner.document_done(0, action.lease.lease, 0)
                    planner.target_gone(0)
                    planner.target_ready(0)
                else:
                    planner.filled(0, action.lease.lease, now)
        return sorted(given), decided, planner.next_lease

    given, decided, next_lease = run(True, {})
    assert decided == {3: {9, 10, 11}, 4: {13}}
    assert given[2] == (0, 4, (12, 14)) and given[4] == (1, 3, None)
    assert next_lease == 100 + 6 + 2 + 1  # six packs, two deaths before the guilty one is found, and once without it
    assert run(False, decided) == (given, {}, 100 + 5)
    with pytest.raises(ValueError, match=r"documents \[7\] are not in pack 0"):
        run(False, {0: {7}})


def test_what_cannot_be_is_refused():
    planner = Planner(make_packs(4), drafters=2, slots=1)
    given = ready(planner, targets=1)
    with pytest.raises(RuntimeError, match="target 0 is known already"):
        planner.target_ready(0)
    with pytest.raises(RuntimeError, match=r"rejects documents \[7\] of pack 0"):
        planner.rejected(0, given[0].lease, [7], NONFINITE, 1.0)
    with pytest.raises(RuntimeError, match="document 0 of pack 0"):
        planner.document_done(0, given[0].lease, 0)  # not leased one by one
    with pytest.raises(RuntimeError, match="slot 0"):
        planner.freed(0, 0, 0)  # not delivered
    with pytest.raises(RuntimeError, match="drafter 1 frees pack 0"):
        planner.freed(1, 0, 0)
    assert planner.lease_of(0) == (given[0], 0.0) and planner.lease_of(5) is None
    planner.filled(0, given[0].lease, 1.0)  # none of it left a trace
    assert delivered(planner.actions(1.0)) == [(0, 0)]
    with pytest.raises(RuntimeError, match="pack 5 follows pack 3"):
        ready(Planner(iter([make_pack(3, [1]), make_pack(5, [2])]), 1, 2), 2)
    for drafters, slots, factor in ((0, 1, 3.0), (1, 0, 3.0), (1, 1, 1.0)):
        with pytest.raises(ValueError, match="at least"):
            Planner(make_packs(1), drafters, slots, factor)


# Speed, in simulated time


def bursty(packs: int, share: float, seed: int) -> list[float]:
    """Seconds per pack: about one, some of them ten."""
    draw = random.Random(seed)
    return [10.0 if draw.random() < share else draw.uniform(0.5, 1.5) for _ in range(packs)]


ARRANGEMENTS = [  # targets, drafters, slots, seconds a drafter reads
    (1, 1, 2, 0.5),
    (3, 1, 4, 0.3),
    (4, 1, 8, 0.05),
    (8, 1, 16, 0.2),
    (3, 3, 3, 1.0),
]


@pytest.mark.parametrize(("targets", "drafters", "slots", "read"), ARRANGEMENTS)
@pytest.mark.parametrize("share", [0.0, 0.05, 0.2])
def test_bursty_packs_reach_the_bound(targets, drafters, slots, read, share):
    """Packs that are slow whoever computes them: a hedge cannot help, and must not harm."""
    packs = 1200
    seconds = bursty(packs, share, seed=targets)
    best = bound(packs, targets, slots, lambda seq: seconds[seq], lambda seq: read, drafters)

    def run(hedge_factor: float) -> float:
        planner = Planner(make_packs(packs), drafters, slots, hedge_factor)
        return Simulation(planner, targets, lambda target, seq: seconds[seq], lambda seq: read, drafters).run()

    assert run(hedge_factor=1e9) == pytest.approx(best)  # without hedges it is exactly this
    assert best / run(hedge_factor=3.0) >= 0.95


def test_bursty_targets_are_helped_by_hedges():
    """A target that stalls for a while, not the pack: others take over."""
    draw = random.Random(5)

    def run(hedge_factor: float) -> float:
        planner = Planner(make_packs(1000), 1, 6, hedge_factor)
        seconds = lambda target, seq: 30.0 if draw.random() < 0.02 else draw.uniform(0.5, 1.5)  # noqa: E731
        return Simulation(planner, 4, seconds, lambda seq: 0.1).run()

    assert run(1e9) / run(3.0) > 1.5


@pytest.mark.parametrize("slots", [4, 8, 16])
def test_a_target_ten_times_slower_than_its_four_peers_costs_little(slots):
    packs = 3000
    draw = random.Random(slots)
    seconds = lambda target, seq: draw.uniform(0.8, 1.2) * (10 if target == 4 else 1)  # noqa: E731
    alone = Simulation(Planner(make_packs(packs), 1, slots), 4, seconds, lambda seq: 0.1).run()
    planner = Planner(make_packs(packs), 1, slots)
    together = Simulation(planner, 5, seconds, lambda seq: 0.1)
    assert alone / together.run() >= 0.95
    assert together.leases_of[4] >= 5  # it rests, and is tried again


def test_a_slow_target_works_where_its_peers_need_not_wait_for_it():
    """Four times slower beside one peer, with places enough: it brings a quarter more."""
    seconds = lambda target, seq: 4.0 if target else 1.0  # noqa: E731
    alone = Simulation(Planner(make_packs(1000), 1, 8), 1, seconds, lambda seq: 0.1).run()
    together = Simulation(Planner(make_packs(1000), 1, 8), 2, seconds, lambda seq: 0.1).run()
    assert alone / together > 1.2


def test_a_slow_target_that_recovers_works_again():
    planner = Planner(make_packs(4000), 1, 6)
    simulation = Simulation(
        planner, 5, lambda target, seq: 10.0 if target == 4 and seq < 1000 else 1.0, lambda seq: 0.1
    )
    simulation.run()
    assert simulation.leases_of[4] > 250  # of 600 if it had recovered at once


def test_a_resting_target_works_when_it_is_the_last():
    planner = Planner(make_packs(500), 1, 4)
    simulation = Simulation(planner, 2, lambda target, seq: 50.0 if target else 1.0, lambda seq: 0.1)
    while planner._pace.rests_until(1) <= simulation.now:
        simulation.step()
    assert planner.lease_of(1) is None
    planner.target_gone(0)
    assert list(leases(planner.actions(simulation.now))) == [1]


def test_the_end_of_a_rest_is_a_deadline():
    planner = Planner(make_packs(500), 1, 4)
    simulation = Simulation(planner, 2, lambda target, seq: 50.0 if target else 1.0, lambda seq: 0.1)
    while not 0 < planner._pace.rests_until(1) - simulation.now < 0.95:
        simulation.step()
    end = planner.next_deadline(simulation.now)
    assert end == planner._pace.rests_until(1)  # before target 0 could be overdue
    assert planner.actions(end - 1e-3) == [] and list(leases(planner.actions(end))) == [1]


def test_a_target_without_peers_is_never_late():
    planner = Planner(make_packs(60), 1, 4)
    simulation = Simulation(planner, 1, lambda target, seq: 1.0 + 20.0 * (seq >= 10), lambda seq: 0.1)
    while simulation.leases_of[0] < 20:
        simulation.step()
    assert planner._pace.rests_until(0) < simulation.now


def test_three_equal_targets_work_at_once():
    planner = Planner(make_packs(600), 1, 4)
    draw = random.Random(0)
    simulation = Simulation(planner, 3, lambda target, seq: draw.uniform(0.8, 1.2), lambda seq: 0.25)
    total = simulation.run()
    assert sum(time for working, time in simulation.by_working.items() if working >= 2) > 0.9 * total


def test_nothing_grows_with_the_packs_done():
    planner = Planner(make_packs(20000), 2, 3)
    Simulation(planner, 3, lambda target, seq: 1.0, lambda seq: 0.1, drafters=2).run()
    assert planner.counts().leases == 20000
    grown = [len(value) for value in vars(planner).values() if hasattr(value, "__len__")]
    assert max(grown) <= 6 and len(planner._pace._recent) <= 32
