"""`python -m ttac`, for where the console script is not on the path."""

import sys

from ttac.cli import main

sys.exit(main())
