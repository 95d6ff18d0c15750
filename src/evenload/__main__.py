"""`python -m evenload`."""

from evenload.cli.main import main

raise SystemExit(main())
