"""`quintet serve` with executors that propose as many drafts as allowed.

``python -m tests.chaos.longest_drafts serve …`` is the server; as a child of the supervisor the module is the executor.
"""

from __future__ import annotations

import sys

from quintet.executor import main
from quintet.process.child import child_main
from quintet.wire.ids import Role
from tests.models.speculation.longest_drafts import drafting
from tests.processes.poison import run_server

if __name__ == "__main__":
    if "--parent" not in sys.argv:
        sys.exit(run_server(__spec__.name))
    make = main.make_worker
    main.make_worker = lambda *given: drafting(make(*given))
    child_main(Role.EXECUTOR, main.run)
