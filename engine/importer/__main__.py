"""`python -P -m inferd.engine.importer SOURCE.gguf FOLDER`: the child that `run.import_gguf` starts."""

import sys

from inferd.engine.importer.main import main

sys.exit(main(sys.argv[1:]))
