"""What a run tells: its metrics and events on disk, and its progress on the console.

metrics.py   metrics.jsonl and events.jsonl, valid JSON whatever happens
console.py   one live line on a terminal, heartbeat lines elsewhere

Once opened, nothing here raises into the work it observes.
"""
