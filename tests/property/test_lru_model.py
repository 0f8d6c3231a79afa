"""The pool under its plainest policy, against the plainest model of it."""

from collections import OrderedDict

import hypothesis.strategies as st
from hypothesis import given, settings

from kvtierd.testing.rig import LadderRig, key


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["store", "load"]), st.integers(0, 11)), max_size=120),
    st.integers(1, 6),
)
def test_without_chains_the_pool_is_plain_lru(operations, slots):
    """Compared with an OrderedDict, the simplest LRU there is."""
    rig = LadderRig(slots)
    model: OrderedDict[int, None] = OrderedDict()
    for verb, number in operations:
        if verb == "store":
            rig.store(number)
            model[number] = None
            model.move_to_end(number)
            if len(model) > slots:
                model.popitem(last=False)
        else:
            got = rig.load(number)
            assert bool(got.keys) == (number in model)
            if got.keys:
                model.move_to_end(number)
                rig.release(got.lease)
    rig.check()
    assert {entry for _, entry in rig.inventory()} == {key(number) for number in model}
