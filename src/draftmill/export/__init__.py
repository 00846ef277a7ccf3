"""Drafters on disk for other engines, and the proof that they load there and draft the same."""
