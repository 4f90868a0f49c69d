"""Counts: what the scheduler has done since the start. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    admitted: int = 0
    bypasses: int = 0  # starts ahead of an earlier request
    stalled_steps: int = 0  # steps that a sequence sat out, for a safe order or another's reservation
    postponed: int = 0  # starts that could not be made when they were due
    expired: int = 0
    prefix_hits: int = 0
    prefix_rows: int = 0  # rows reused
    drafted: int = 0
    accepted: int = 0  # draft tokens that were right
