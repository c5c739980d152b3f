"""Rows of those that have ended go to those that stand by."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specjax.decode.state import EMPTY, LENGTH, RUNNING, STOPPED, Standby, take_over

SLOTS, WIDTH = 12, 3


@st.composite
def cases(draw):
    slots = draw(st.permutations(range(SLOTS)))
    rows, room = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    finish = draw(st.lists(st.sampled_from([RUNNING, STOPPED, LENGTH, EMPTY]), min_size=SLOTS,
                           max_size=SLOTS))  # fmt: skip
    for slot in slots[rows:]:
        finish[slot] = RUNNING  # who stands by was started, and has not run
    active = draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    return finish, slots[:rows], active, slots[rows : rows + room], draw(st.integers(0, room))


@given(cases())
def test_rows_of_those_that_have_ended_go_to_those_that_stand_by_in_order(case):
    finish, slots, active, others, count = case
    table = np.arange(SLOTS * WIDTH).reshape(SLOTS, WIDTH)
    line, expected, who = list(range(count)), list(slots), list(range(len(slots)))
    for row, slot in enumerate(slots):
        if active[row] and finish[slot] != RUNNING and line:
            first = line.pop(0)
            expected[row], who[row] = others[first], len(slots) + first
    standby = Standby(jnp.array(others), jnp.array(table[others]), jnp.int32(count))
    found = take_over(
        SimpleNamespace(finish=jnp.array(finish)),
        jnp.array(slots), jnp.array(active), jnp.array(table[slots]), standby,
    )  # fmt: skip
    assert found[0].tolist() == expected and found[2].tolist() == who
    np.testing.assert_array_equal(found[1], table[expected])
