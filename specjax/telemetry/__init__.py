"""Why drafts are rejected: collected on the host chunk by chunk, summed up, printed and drawn.

`SpecConfig(telemetry=True)` or `SPECJAX_TELEMETRY=1` switches it on; the device reports rejections
by `specjax.decode.report`. After a run `llm.telemetry.summary()` has the figures,
`llm.telemetry.write_jsonl("run.jsonl")` keeps them, and `python -m specjax.telemetry run.jsonl`
prints and draws them.
"""

from specjax.telemetry.collector import (
    CAUSES,
    Collector,
    Rejection,
    SlotInfo,
    Summary,
    active_transforms,
    read_jsonl,
)

__all__ = [
    "CAUSES",
    "Collector",
    "Rejection",
    "SlotInfo",
    "Summary",
    "active_transforms",
    "read_jsonl",
]
