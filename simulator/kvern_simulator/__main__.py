"""`python -m kvern_simulator`."""

import sys

from kvern_simulator.compare import main

sys.exit(main())
