"""`python -m jaxdist`: the console script without its installation."""

import sys

from jaxdist.cli import main

if __name__ == "__main__":
    sys.exit(main())
