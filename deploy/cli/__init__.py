"""One file per command of ``quintet``; each has ``add_parser(subparsers)`` and ``run(args) -> int``."""
