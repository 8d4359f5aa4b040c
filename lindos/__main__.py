"""`python -m lindos` is `lindos`."""

import sys

from lindos.cli import main

if __name__ == "__main__":
    sys.exit(main())
