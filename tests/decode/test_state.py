"""Rows of those that have ended go to those that wait."""

import jax.numpy as jnp
from hypothesis import given
from hypothesis import strategies as st

from specjax.decode.state import take_over


@st.composite
def cases(draw):
    count = draw(st.integers(1, 10))
    active = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    runs = [a and draw(st.booleans()) for a in active]
    who = draw(st.permutations(range(count)))
    return runs, active, who[: draw(st.integers(1, count))]


@given(cases())
def test_rows_of_those_that_have_ended_go_to_those_that_wait_in_order(case):
    runs, active, who = case
    line = [i for i, at in enumerate(runs) if at and i not in who]
    expected = [line.pop(0) if active[i] and not runs[i] and line else i for i in who]
    found = take_over(jnp.array(runs), jnp.array(active), jnp.array(who))
    assert found.tolist() == expected
