"""The draft head that a run goes on with."""

import dataclasses

import pytest

from specjax.checkpoint.weights import Head, describe_head
from specjax.command_line import ConfigError
from specjax.drafts.eagle3 import Eagle3Source
from specjax.models.families.dense import dense_config
from train.heads.files import require_same_head


def test_a_head_whose_files_say_something_else_since_is_not_gone_on_with():
    model = dense_config(64, 16, 24, 1, 4, 2, 8)
    source = Eagle3Source.of(model)
    cfg = dataclasses.replace(source.cfg, norm_before_residual=True)
    was, now = (
        describe_head(Head(one, source.init(0)))
        for one in (source, dataclasses.replace(source, cfg=cfg))
    )
    require_same_head(was, dict(was), model)
    with pytest.raises(ConfigError, match="files describe now: its cfg.norm_before_residual is F"):
        require_same_head(was, now, model)
    own = {"draft_source": {"kind": "my:Own"}}
    for saved, current in (({}, now), (was, None), (own, own)):
        require_same_head(saved, current, model)
