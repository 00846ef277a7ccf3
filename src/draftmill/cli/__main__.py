"""`python -m draftmill.cli` is `draftmill`."""

from draftmill.cli.main import main

main()
