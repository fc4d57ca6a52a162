"""`python -m edge_pc` is `edge-pc`."""

import sys

from edge_pc.cli import main

if __name__ == "__main__":
    sys.exit(main())
