"""Conservation: every document of every epoch ends once, and the sums agree."""

import pytest

from draftmill.run.ledger import Ledger
from draftmill.wire import Outcome


def test_counts_by_end_and_closing():
    ledger = Ledger(5)
    ledger.enter(0, [0, 3], Outcome.TRAINED)
    ledger.enter(0, [1], Outcome.FILTERED, "no_anchor")
    assert ledger.counts(0) == {"open": 2, "trained": 2, "filtered: no_anchor": 1}
    ledger.enter(1, [2], Outcome.TRAINED)  # the next epoch may begin while this one is open
    ledger.enter(0, [2, 4], Outcome.FAILED, "nonfinite_step")
    assert ledger.counts(0) == {"trained": 2, "filtered: no_anchor": 1, "failed: nonfinite_step": 2}
    assert ledger.totals() == {"trained": 3, "filtered: no_anchor": 1, "failed: nonfinite_step": 2}
    ledger.check()


@pytest.mark.parametrize("documents", [[1], [0, 2, 2], [1, 4]])
def test_a_second_end_is_refused(documents):
    ledger = Ledger(5)
    ledger.enter(0, [1], Outcome.TRAINED)
    with pytest.raises(RuntimeError, match="would end twice in epoch 0"):
        ledger.enter(0, documents, Outcome.FAILED, "x")
    assert ledger.counts(0) == {"open": 4, "trained": 1}
    ledger.enter(0, [0, 2, 3, 4], Outcome.TRAINED)
    with pytest.raises(RuntimeError, match="epoch 0 is closed"):
        ledger.enter(0, [0], Outcome.TRAINED)


def test_state_survives_a_round_trip_and_a_forged_one_is_refused():
    ledger = Ledger(3)
    ledger.enter(0, [0, 1, 2], Outcome.TRAINED)
    ledger.enter(1, [2], Outcome.FAILED, "nonfinite_features")
    state, tensors = ledger.state()
    again = Ledger.restore(state, tensors)
    assert again.counts(0) == {"trained": 3}
    assert again.counts(1) == {"open": 2, "failed: nonfinite_features": 1}
    with pytest.raises(RuntimeError, match="twice"):
        again.enter(1, [2], Outcome.TRAINED)
    state["closed"]["0"]["trained"] = 2
    with pytest.raises(RuntimeError, match="do not add up to 3"):
        Ledger.restore(state, tensors)


def test_a_grown_dataset_counts_from_its_epoch_on():
    ledger = Ledger(2)
    ledger.enter(0, [0, 1], Outcome.TRAINED)
    ledger.set_documents(1, 3)
    ledger.enter(1, [0, 1], Outcome.TRAINED)
    assert ledger.counts(1) == {"open": 1, "trained": 2}
    again = Ledger.restore(*ledger.state())
    again.set_documents(1, 3)
    again.enter(1, [2], Outcome.TRAINED)
    assert (again.counts(0), again.counts(1), again.documents(7)) == ({"trained": 2}, {"trained": 3}, 3)
    with pytest.raises(RuntimeError, match="epoch 0"):
        again.set_documents(0, 3)  # an epoch keeps what it began with
