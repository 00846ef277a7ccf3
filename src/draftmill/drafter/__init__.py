"""The drafter: network, anchors, visibility, objective. Pure functions and modules; no processes, no files."""
