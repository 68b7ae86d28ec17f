"""Where the models and stand-ins lie that benchmarks share with the tests. Imported for its effect, before those."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
