"""Bounded places for filled packs, shared by a target that writes and a drafter that reads."""
