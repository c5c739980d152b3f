"""P-EAGLE heads in an engine; `test_eagle3` has their equations and their files."""

import dataclasses

import drive
from test_eagle3 import MAX_LEN, POLICY, params_of, policy_of, source_of

from specjax.drafts.eagle3 import Eagle3Source


def test_tokens_are_those_of_plain_decoding_with_random_weights_and_with_nan():
    """Its chains, its trees and its own plain rounds change places."""
    policy = policy_of(POLICY)
    source = source_of(width=8, columns=10, taps=(0, 2), own_embedding=True, mask_token=3)
    source = Eagle3Source(dataclasses.replace(source.cfg, target_width=POLICY.hidden_size))
    strategies = ["3_1_4", "off", "2_2_5"]
    drive.assert_plain_tokens(POLICY, policy, source, params_of(source), strategies, MAX_LEN)
