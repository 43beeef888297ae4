"""``python -m rapid_llm`` is ``rapid-llm``."""

import sys

from rapid_llm.entrypoints.cli import main

sys.exit(main())
