"""`python -m flotilla ...` is the command `flotilla ...`."""

import sys

from flotilla.cli import main

sys.exit(main())
