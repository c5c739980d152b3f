"""Rows of those that have ended go to those that wait."""

import jax.numpy as jnp
from hypothesis import given
from hypothesis import strategies as st

from specjax.decode.state import take_over


@st.composite
def cases(draw):
    count = draw(st.sampled_from([1, 8]))  # each is a program of its own
    active = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    unfinished = [a and draw(st.booleans()) for a in active]
    row_to_sequence = draw(st.permutations(range(count)))
    return unfinished, active, row_to_sequence[: draw(st.sampled_from([1, count]))]


@given(cases())
def test_rows_of_those_that_have_ended_go_to_those_that_wait_in_order(case):
    unfinished, active, row_to_sequence = case
    waiting = [i for i, runs in enumerate(unfinished) if runs and i not in row_to_sequence]
    expected = [
        waiting.pop(0) if active[i] and not unfinished[i] and waiting else i
        for i in row_to_sequence
    ]
    found = take_over(jnp.array(unfinished), jnp.array(active), jnp.array(row_to_sequence))
    assert found.tolist() == expected
