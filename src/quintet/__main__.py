"""``python -m quintet``: same as the ``quintet`` command."""

import sys

from quintet.deploy.cli.main import main

sys.exit(main())
