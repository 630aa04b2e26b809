"""Location of model files: a local folder, the hub, a package index, or this package."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path

from quintet.deploy.config.model.packaged_models import PACKAGED_MODELS, locate_packaged
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, is_gguf, part_paths

_HF_CONFIG_FILES = ["*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken"]
_WEIGHT_FILES = ["*.safetensors"]
_PICKLED_FILES = ["pytorch_model*.bin", "medusa_lm_head.pt"]
"""Downloaded only if there are no safetensors files."""
_CODE_FILES = ["*.py"]
_UNWANTED_FILES = ["*/*", "consolidated*"]
"""Subfolders, and second copies of the weights in other formats."""
_TYPE_NAME = re.compile(r"[A-Za-z0-9_-]{2,40}")
"""Quantization type of a GGUF file of a hub repository: ``Q4_K_M``."""
_FILE_AS_IN_VLLM = re.compile(r"^([^/:]+/[^/:]+)/")
"""Repository in the name of a GGUF file: ``owner/name/file.gguf``."""
_NAMED_TEMPLATES = "additional_chat_templates/*.jinja"
"""Files of subfolders that are downloaded."""


def locate_model(
    name: str | None,
    with_weights: bool,
    flag: str = "MODEL",
    with_code: bool = False,
    revision: str | None = None,
) -> Path:
    """Return the local folder of a model, or its GGUF file; download it if ``name`` is a hub name.

    ``owner/name:file.gguf`` and ``owner/name:folder/file.gguf`` are single files of a hub repository (``/`` may replace ``:``, as
    in vLLM), and ``owner/name:Q4_K_M`` is its GGUF file of that type. None is the toy model that ships with Quintet; names in
    `PACKAGED_MODELS` are files of Python packages. revision: branch, tag or commit of a hub repository. flag: used in errors.
    ``HF_HUB_OFFLINE=1`` uses the hub cache only. Raises `ConfigError`.
    """
    if name is None:
        from quintet.deploy.embedded import default_model_path

        return Path(default_model_path())
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.exists():
        if is_gguf(folder):
            target = folder.resolve()  # a link of the hub cache has a target without the name
            return part_paths(target if is_gguf(target) else folder.absolute())[0]
        raise ConfigError(
            f"{flag} {name!r} is a file; give the folder that contains config.json, or a .gguf file"
        )
    if name in PACKAGED_MODELS:
        return locate_packaged(name, flag)
    repository, _, file = (_FILE_AS_IN_VLLM.sub(r"\1:", name) if is_gguf(folder) else name).partition(":")
    is_file_of_hub = repository.count("/") == 1 and not name.startswith(("/", ".", "~"))
    if is_file_of_hub and _TYPE_NAME.fullmatch(file):
        return _fetch_type(repository, file, with_weights, flag, revision)
    if is_file_of_hub and is_gguf(Path(file)):
        parts = [part.as_posix() for part in part_paths(Path(file))]
        return (
            _fetch(repository, parts if with_weights else parts[:1], flag, revision, unwanted=()) / parts[0]
        )
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ConfigError(f"{flag} {name!r}: {'file' if is_gguf(folder) else 'folder'} not found")
    patterns = _HF_CONFIG_FILES + (_WEIGHT_FILES if with_weights else []) + (_CODE_FILES if with_code else [])
    folder = _fetch(name, patterns, flag, revision)
    if with_weights and name.lower().endswith("gguf") and not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"{flag} {name!r} is a repository of GGUF files: name a type or a file, {name}:Q4_K_M"
        )
    return folder


def fetch_adapter(name: str, flag: str) -> Path:
    """Return the local folder of a LoRA adapter; download it if ``name`` is a hub name. Raises `ConfigError`."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if name.startswith(("/", ".", "~")) or name.count("/") != 1:
        raise ConfigError(f"{flag} {name!r}: folder not found")
    return _fetch(name, [ADAPTER_CONFIG, ADAPTER_WEIGHTS], flag)


def _fetch_type(repository: str, kind: str, with_weights: bool, flag: str, revision: str | None) -> Path:
    """Download the GGUF file of a quantization type; the one with the shortest name of several."""
    parts = "?????" if with_weights else "00001"
    endings = (".gguf", f"-{parts}-of-?????.gguf")
    patterns = [f"*[-._/]{each}{end}" for each in (kind, kind.upper(), kind.lower()) for end in endings]
    folder = _fetch(repository, patterns, flag, revision, unwanted=("*mmproj*",))
    named = re.compile(rf"(.*[-._])?{re.escape(kind)}(-00001-of-\d{{5}})?\.gguf", re.IGNORECASE)
    found = [path for path in folder.rglob("*.gguf") if named.fullmatch(path.name)]
    models = [path for path in found if "mmproj" not in path.name]
    if not models:
        raise ConfigError(
            f"{flag} {repository}:{kind}: the repository has no GGUF file of this type; name the file, {repository}:FILE.gguf"
        )
    return min(models, key=lambda path: (len(path.name), path.name))


def _fetch(
    name: str,
    patterns: list[str],
    flag: str,
    revision: str | None = None,
    unwanted: Sequence[str] = tuple(_UNWANTED_FILES),
) -> Path:
    """Download a hub repository, or return it from the hub cache."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    # huggingface_hub reads the variable only when it is imported, which may precede LLM(download_dir=...)
    cache = os.environ.get("HF_HUB_CACHE")
    cache_dir = None if cache is None else os.path.expanduser(cache)
    download = functools.partial(snapshot_download, name, revision=revision, cache_dir=cache_dir)
    try:
        download(allow_patterns=_NAMED_TEMPLATES)
        folder = Path(download(allow_patterns=patterns, ignore_patterns=list(unwanted)))
        if "*.safetensors" in patterns and not any(folder.glob("*.safetensors")):
            download(allow_patterns=_PICKLED_FILES, ignore_patterns=_UNWANTED_FILES)
        return folder
    except LocalEntryNotFoundError:
        reason = (
            "HF_HUB_OFFLINE is set and it is not in the hub cache"
            if constants.HF_HUB_OFFLINE
            else "the hub cannot be reached and it is not in the hub cache"
        )
    except HFValidationError:
        reason = "it is not a valid hub name"
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no response"
        reason = f"the hub answered {status}" + (
            "; check the name, and that HF_TOKEN has access" if status in (401, 403, 404) else ""
        )
    except Exception as error:  # noqa: BLE001 - the hub client passes on every error of its HTTP and storage libraries
        reason = f"downloading it from the hub failed: {str(error) or type(error).__name__}"
    message = f"{flag} {name!r}: no such folder in {os.getcwd()}, and {reason}"
    if "/" not in name and not is_gguf(Path(name)):
        message += f"; without a slash it must be a folder or one of: {', '.join(PACKAGED_MODELS)}"
    raise ConfigError(message)
