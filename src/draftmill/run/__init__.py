"""Whole runs: planner, ledger, run folder, and the composition of all parts. The only part that knows all others."""
