"""Draft-and-verify decoding and what it measures: acceptance and losslessness. Greedy; engine-independent."""
