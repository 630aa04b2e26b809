"""YAML configuration file: ``quintet serve --config server.yaml``."""

from __future__ import annotations

from pathlib import Path

from quintet.deploy.config.deprecated_flags import with_new_names
from quintet.deploy.config.flag_table import make_options
from quintet.deploy.config.flags import Options
from quintet.deploy.config.rules import derive_max_num_seqs
from quintet.deploy.config.vllm_flags import ROPE
from quintet.deploy.config.vllm_settings import translated
from quintet.wire.errors import ConfigError


def read_config_file(path: Path) -> dict[str, object]:
    """Read a YAML mapping of flag names to values, and validate names and types.

    Names may have dashes or underscores. Raises `ConfigError` with the file and the key.
    """
    import yaml  # slow to import, and rarely needed

    try:
        loaded: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = " ".join(str(error).split())
        raise ConfigError(f"--config {path} is not valid YAML: {where}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"--config {path} must be a mapping like `port: 8000`, not a {type(loaded).__name__}"
        )
    settings = with_new_names(loaded)
    make_options(settings, str(path))
    return {str(key).replace("-", "_"): value for key, value in settings.items()}


def merged_options(
    config_file: Path | None, flags: dict[str, object], source: str = "the command line"
) -> tuple[Options, list[str]]:
    """Return the options of a file overridden by flags, and notes on ignored or derived settings."""
    settings_of_file = {} if config_file is None else read_config_file(config_file)
    # RoPE settings become part of the flag --hf-overrides, if there is one.
    rope = {key: value for key, value in settings_of_file.items() if key in ROPE}
    others = {key: value for key, value in settings_of_file.items() if key not in ROPE}
    in_file, notes = translated(others, str(config_file))
    given, more_notes = translated({**in_file, **rope, **with_new_names(flags)}, source)
    settings, derived_notes = derive_max_num_seqs(given)
    return make_options(settings, source), [*dict.fromkeys([*notes, *more_notes]), *derived_notes]
