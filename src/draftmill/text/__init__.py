"""How conversations become token rows with supervision, and rows become packs."""
