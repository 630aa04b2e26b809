"""Parse outputs with `openai-harmony`: JSON list of texts at stdin, their messages at stdout.

The package reads its vocabulary from the network or from a folder. litellm's package has the same file, with the digest that
`openai-harmony` requires.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import openai_harmony as harmony

O200K = "fb374d419588a4632f3f557e76b4b70aebbca790"
"""File name of the vocabulary in tiktoken's cache."""


def read(encoding: harmony.HarmonyEncoding, text: str) -> list[list[str | None]] | None:
    """Return channel, recipient and text of each message; None if the package rejects the output."""
    parser = harmony.StreamableParser(encoding, harmony.Role.ASSISTANT)
    try:
        for token_id in encoding.encode(text, allowed_special="all"):
            parser.process(token_id)
        parser.process_eos()
    except harmony.HarmonyError:
        return None
    return [[message.channel, message.recipient, message.content[0].text] for message in parser.messages]


def main() -> None:
    """Parse all texts."""
    with tempfile.TemporaryDirectory() as folder:
        package = find_spec("litellm")
        assert package is not None and package.origin is not None
        vocabulary = Path(package.origin).parent / "litellm_core_utils/tokenizers" / O200K
        shutil.copy(vocabulary, Path(folder) / "o200k_base.tiktoken")
        os.environ["TIKTOKEN_ENCODINGS_BASE"] = folder
        encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    json.dump([read(encoding, text) for text in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main()
