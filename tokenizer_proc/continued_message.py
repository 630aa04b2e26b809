"""Continuation of the final message: a tag at its end marks where the rendered prompt is cut."""

from __future__ import annotations

from typing import Any

from quintet.tokenizer_proc.template_values import ContentParts, PartsText, text_part
from quintet.wire.chat import Message
from quintet.wire.errors import invalid

CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


def tag_final(messages: list[Message], source: str) -> str:
    """Append a tag to the message to be continued; return its text."""
    if "content" not in source:
        raise invalid(
            "continue_final_message is true but the chat template does not use the messages' content.",
            "continue_final_message",
        )
    content = messages[-1]["content"]
    if isinstance(content, ContentParts):
        last = next((i for i in reversed(range(len(content))) if "text" in content[i]), None)
        if last is None:
            content = ContentParts([*content, text_part("")])
            last = len(content) - 1
        final: str = content[last]["text"]
        tagged: Any = ContentParts(content)
        tagged[last] = text_part(final + CONTINUE_TAG)
    else:
        final = str(content)
        tagged = (PartsText if isinstance(content, PartsText) else str)(final + CONTINUE_TAG)
    messages[-1] = {**messages[-1], "content": tagged}
    return final


def cut_at_tag(text: str, final: str) -> str:
    """Cut the rendered text at the end of the final message. If the template trims the message, trim the cut too."""
    at = text.rfind(CONTINUE_TAG.strip())
    if at < 0 or final.strip() not in text:
        raise invalid(
            "continue_final_message is true but the chat template does not render the final message unchanged.",
            "continue_final_message",
        )
    kept = text[:at]
    return kept if text.startswith(CONTINUE_TAG, at) else kept.rstrip()
