"""Warns once if hardly a drafted token is accepted, and names the settings to suspect."""

from __future__ import annotations

import logging

from specjax.interfaces import Draft
from specjax.spelling import Spell, python

log = logging.getLogger(__name__)

ROUNDS = 300  # rounds of sequences that drafted, after which the accept length is looked at
LEAST = 1.05  # accept length below which a draft is not the one for its target, or is run wrongly


class AcceptanceAlarm:
    """Looks at the accept length of the first `ROUNDS` drafted rounds with a head, once.

    Args:
      source: what drafts.

    Attributes:
      spell: function that spells settings in the warning.
    """

    def __init__(self, source: Draft):
        self.spell: Spell = python
        self._source, self._rounds, self._accepted = source, 0, 0

    @property
    def is_done(self) -> bool:
        """Whether enough rounds were counted."""
        return self._rounds >= ROUNDS

    def renew(self) -> None:
        """Counts anew, because the source drafts with another head from now on."""
        self._rounds = self._accepted = 0

    def add(self, rounds: int, accepted: int) -> bool:
        """Counts drafted rounds, and logs the warning if it is due.

        Args:
          rounds: number of rounds, of all sequences.
          accepted: number of drafted tokens that they accepted.

        Returns:
          whether enough rounds were counted: further calls have no effect then, until `renew`.
        """
        if self.is_done:
            return True
        self._rounds, self._accepted = self._rounds + rounds, self._accepted + accepted
        if self._rounds < ROUNDS:
            return False
        length = 1 + self._accepted / self._rounds
        if length < LEAST:
            log.warning(
                "accept length has been %.2f for %d rounds: speculation only costs time. %s",
                length, self._rounds, advice(self._source, self.spell),
            )  # fmt: skip
        return True


def advice(source: Draft | None, spell: Spell = python) -> str:
    """Says what to look at if hardly a drafted token is accepted; `spell` spells settings."""
    found = "" if source is None else source.suspects()
    found = found.replace("draft_overrides", spell("draft_overrides"))
    return found[:1].upper() + found[1:] or "Is the draft the one that belongs to this policy?"
