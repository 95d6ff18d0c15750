"""`python -m evenload`."""

from evenload.cli.main import entry

entry()
