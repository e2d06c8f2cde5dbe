"""`python -m fastqt` is the command line."""

import sys

from fastqt.sentences.cli import main

if __name__ == "__main__":
    sys.exit(main())
