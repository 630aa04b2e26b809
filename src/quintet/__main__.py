"""``python -m quintet``: the same as ``quintet``, for where the script is not on the path."""

import sys

from quintet.deploy.cli.main import main

sys.exit(main())
