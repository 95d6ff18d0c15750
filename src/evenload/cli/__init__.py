"""The command line: one module a verb, each is read, one call, render."""
