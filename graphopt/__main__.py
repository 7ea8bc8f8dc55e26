"""`python -m graphopt`."""

import sys

try:
    from graphopt.cli import main

    main()
except KeyboardInterrupt:  # while still importing: commands answer for themselves
    sys.exit(130)
