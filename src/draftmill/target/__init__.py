"""The frozen model: how it is loaded, its features, its embedding and head, and the responses it writes."""
