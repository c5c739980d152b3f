"""Telemetry of rejected drafts: collected on the host after each chunk, and summarised.

`SpecConfig(telemetry=True)` enables it; the device reports rejections by `specjax.decode.report`.
After a run `llm.telemetry.summary()` returns the figures, and
`llm.telemetry.write_jsonl("run.jsonl")` writes them to a file.
"""

from specjax.telemetry.collector import (
    CAUSES,
    Collector,
    Rejection,
    SlotInfo,
    Summary,
    active_transforms,
)

__all__ = [
    "CAUSES",
    "Collector",
    "Rejection",
    "SlotInfo",
    "Summary",
    "active_transforms",
]
