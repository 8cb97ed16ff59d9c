"""``python -m scoped_fn`` is ``scoped-fn``."""

import sys

from scoped_fn.cli import main

sys.exit(main())
