"""`python -m elasticrec`: the same as `elasticrec`."""

import sys

from elasticrec.cli import main

sys.exit(main())
