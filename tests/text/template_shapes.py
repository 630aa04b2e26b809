"""Chat templates with the structure of published families, and the message format that each expects.

The texts are our own and marks are shortened. Loops, tests, refusals and uses of contents, calls and arguments are kept.
"""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """A template, and the form of messages with which transformers renders what its author intended."""

    source: str
    arguments: str = "object"
    """``object`` or ``text``."""
    content: str = "string"
    """``string``; ``parts``: lists stay lists; ``only parts``: text becomes a list."""
    null: str = "text"
    """``none`` if the template tests for none, else ``text``: empty text."""


def turns(user: str, assistant: str = "", other: str = "", before: str = "", system: str = "") -> str:
    """Return a template with one format for each role."""
    assistant = assistant or "[A]{{ m.content }}[/A]"
    system = system or "[S]{{ m.content }}[/S]"
    return (
        before
        + "{%- for m in messages -%}{%- if m.role == 'user' -%}"
        + user
        + "{%- elif m.role == 'system' -%}"
        + system
        + "{%- elif m.role == 'assistant' -%}"
        + assistant
        + other
        + "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt %}[A]{% endif -%}"
    )


USER = "[U]{{ m['content'] }}[/U]"
TOOL = "{%- elif m.role == 'tool' -%}[T]{{ m.content }}[/T]"
HERMES_CALLS = (
    "{%- for c in m.tool_calls -%}{%- set f = c.function -%}<call>"
    '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</call>{%- endfor -%}'
)
EITHER_CALLS = (
    "{%- for c in m.tool_calls or [] -%}{%- if c.function -%}{%- set c = c.function -%}{%- endif -%}<call>{{ c.name }}:"
    "{%- if c.arguments is string -%}{{ c.arguments }}{%- else -%}{{ c.arguments | tojson }}{%- endif -%}</call>{%- endfor -%}"
)
JOINED_CALLS = (
    "{%- for c in m['tool_calls'] -%}{{ '<call>' + c['type'] + '<sep>' + c['function']['name'] + '\\n```json\\n'"
    " + c['function']['arguments'] + '\\n```</call>' }}{%- endfor -%}"
)
PAIR_CALLS = (
    "{%- for c in m.tool_calls or [] -%}<call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}"
    "<k>{{ k }}</k><v>{{ v if v is string else v | tojson }}</v>{% endfor %}</call>{%- endfor -%}"
)
ALTERNATE = (
    "{%- for m in messages if m.role != 'system' -%}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('roles must alternate user/assistant') }}{%- endif -%}{%- endfor -%}"
)
FIRST_SYSTEM = (
    "{%- if messages[0].role == 'system' -%}{%- set rest = messages[1:] -%}[S]{{ messages[0].content }}[/S]"
    "{%- else -%}{%- set rest = messages -%}{%- endif -%}"
)
SYSTEM_FIRST = (
    "{%- if not loop.first -%}{{ raise_exception('system first') }}{%- endif -%}[S]{{ m.content }}[/S]"
)
GENERATE = "{%- if add_generation_prompt %}[A]{% endif -%}"
MACRO = (
    "{%- macro shown(content) -%}{%- if content is string -%}{{ content }}{%- elif content is iterable -%}"
    "{%- for part in content -%}{{ part.text if part.type == 'text' else part }}{%- endfor -%}"
    "{%- elif content is none -%}{%- else -%}{{ raise_exception('content of an odd type') }}{%- endif -%}{%- endmacro -%}"
)
LOOPED = (
    "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
)
TEXT_OR_PARTS = "{% if m.content is string %}{{ m.content }}{% else %}" + LOOPED + "{% endif %}"
MISTRAL_CALLS = (
    "[CALLS] [{% for c in m.tool_calls %}{% set out = c.function | tojson %}{{ out[:-1] }}"
    "{% if c.id is not defined or c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    ', "id": "{{ c.id }}"}{% endfor %}]'
)
MISTRAL_RESULT = (
    "{%- elif m.role == 'tool' -%}{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}"
    "{{ raise_exception('ids have 9 characters') }}{% endif %}[RESULT]{{ m.tool_call_id }}:{{ m.content }}[/RESULT]"
)
CALLS_OR_TEXT = "{%- if m.tool_calls -%}{}{%- else -%}[A]{{ m.content }}[/A]{%- endif -%}"


def either(calls: str) -> str:
    """Return an assistant's turn with either calls or text."""
    return CALLS_OR_TEXT.replace("{}", calls)


def after_text(calls: str) -> str:
    """Return an assistant's turn with calls after its text."""
    return "[A]{% if m.content %}{{ m.content }}{% endif %}{% if m.tool_calls %}" + calls + "{% endif %}[/A]"


SHAPES: dict[str, Shape] = {
    "chatml": Shape(
        "{% for m in messages %}{{ '<s>' + m['role'] + '\\n' + m['content'] + '<e>' }}{% endfor %}" + GENERATE
    ),
    "chatml that trims": Shape(
        "{% for m in messages %}<s>{{ m.role }}:{{ m.content | trim }}<e>{% endfor %}" + GENERATE
    ),
    "qwen 2.5": Shape(turns(USER, after_text(HERMES_CALLS), TOOL)),
    "qwen 3": Shape(
        turns(
            USER,
            "{%- set content = m.content if m.content is string else '' -%}{%- set r = m.reasoning_content if "
            "m.reasoning_content is string else '' -%}[A]{% if r and loop.last %}<think>{{ r }}</think>{% endif %}{{ content }}"
            + EITHER_CALLS
            + "[/A]",
            TOOL,
        )
    ),
    "qwen 3.5": Shape(
        MACRO
        + turns(
            "[U]{{ shown(m.content) }}[/U]",
            "[A]{{ shown(m.content) | trim }}" + PAIR_CALLS + "[/A]",
            "{%- elif m.role == 'tool' -%}[T]{{ shown(m.content) }}[/T]"
            "{%- else -%}{{ raise_exception('unexpected role') }}",
            system="{%- if not loop.first -%}{{ raise_exception('system first') }}{%- endif -%}[S]{{ shown(m.content) }}[/S]",
        ),
        content="parts",
        null="none",
    ),
    "qwen vl": Shape(
        turns("[U]" + TEXT_OR_PARTS + "[/U]", "[A]" + TEXT_OR_PARTS + "[/A]", TOOL), content="parts"
    ),
    "llama 2": Shape(ALTERNATE + FIRST_SYSTEM + turns(USER, system="").replace("in messages", "in rest")),
    "llama 3": Shape(
        "{% for m in messages %}<h>{{ m.role }}</h>{{ m['content'] | trim }}<e>{% endfor %}" + GENERATE
    ),
    "llama 3.1": Shape(
        "{%- for m in messages -%}{%- if not (m.role == 'ipython' or m.role == 'tool' or 'tool_calls' in m) -%}"
        "<h>{{ m.role }}</h>{{ m.content | trim }}<e>{%- elif 'tool_calls' in m -%}{%- if not m.tool_calls | length == 1 -%}"
        "{{ raise_exception('one call at once') }}{%- endif -%}{%- set f = m.tool_calls[0].function -%}"
        '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}<e>{%- else -%}<h>ipython</h>'
        "{%- if m.content is mapping or m.content is iterable -%}{{ m.content | tojson }}{%- else -%}{{ m.content }}{%- endif -%}"
        "<e>{%- endif -%}{%- endfor -%}" + GENERATE
    ),
    "llama 3.2 vision": Shape(
        "{%- for m in messages -%}<h>{{ m.role }}</h>{%- if m.content is string -%}{{ m.content }}{%- else -%}"
        "{%- for c in m.content -%}{%- if c.type == 'text' -%}{{ c.text }}{%- endif -%}{%- endfor -%}{%- endif -%}<e>"
        "{%- endfor -%}" + GENERATE,
        content="parts",
    ),
    "llama 4": Shape(
        "{%- for m in messages -%}<h>{{ m.role }}</h>{%- if 'tool_calls' in m and m.tool_calls | length > 0 -%}<py>"
        "{%- for c in m.tool_calls -%}{{ c.function.name }}({{ c.function.arguments | tojson }})<sep>{%- endfor -%}"
        "{%- elif m.content is string -%}{{ m.content }}{%- else -%}{%- for c in m.content -%}{{ c.text }}{%- endfor -%}"
        "{%- endif -%}<e>{%- endfor -%}" + GENERATE,
        content="parts",
    ),
    "llama guard": Shape(
        "{%- for m in messages -%}[{{ m.role }}]" + LOOPED + "{%- endfor -%}" + GENERATE, content="only parts"
    ),
    "mistral 0.1": Shape(
        "{%- for m in messages -%}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}"
        "{{ raise_exception('roles must alternate') }}{%- endif -%}{%- if m.role == 'user' -%}[I]{{ m.content }}[/I]"
        "{%- elif m.role == 'assistant' -%}{{ m.content }}</s>{%- else -%}{{ raise_exception('only user and assistant') }}"
        "{%- endif -%}{%- endfor -%}"
    ),
    "mistral 0.3": Shape(
        "{%- set ns = namespace(index=0) -%}{%- for m in messages if m.role != 'system' -%}"
        "{%- if m.role == 'user' or (m.role == 'assistant' and m.tool_calls is undefined) -%}"
        "{%- if (m.role == 'user') != (ns.index % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}"
        "{%- set ns.index = ns.index + 1 -%}{%- endif -%}{%- endfor -%}"
        + turns(
            "[I]{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}{{ m.content }}[/I]",
            "{%- if m.tool_calls is defined and m.tool_calls is not none -%}" + MISTRAL_CALLS + "{%- else -%}"
            " {{ m.content | trim }}</s>{%- endif -%}",
            MISTRAL_RESULT,
            system=" ",
        )
    ),
    "magistral": Shape(
        turns(
            "[I]{% if m.content is string %}{{ m.content }}{% else %}" + LOOPED + "{% endif %}[/I]",
            "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{% if part.type == 'text' %}"
            "{{ part.text }}{% elif part.type == 'thinking' %}[THINK]{{ part.thinking }}[/THINK]{% endif %}"
            "{% endfor %}{% endif %}",
            TOOL,
        ),
        content="parts",
    ),
    "deepseek v2": Shape(turns("User: {{ m['content'] }}\n", "Assistant: {{ m['content'] }}<e>")),
    "deepseek v3": Shape(
        "{%- set ns = namespace(system='') -%}{%- for m in messages if m['role'] == 'system' -%}"
        "{%- set ns.system = ns.system + m['content'] -%}{%- endfor -%}{{ ns.system }}"
        + turns(
            "<U>{{ m['content'] }}",
            "{%- if m['content'] is none -%}<A>"
            + JOINED_CALLS
            + "{%- else -%}<A>{{ m['content'] }}<e>{%- endif -%}",
            "{%- elif m['role'] == 'tool' -%}<out>{{ m['content'] }}</out>",
            system=" ",
        ),
        arguments="text",
        null="none",
    ),
    "deepseek r1": Shape(
        turns(
            "<U>{{ m['content'] }}",
            "{%- if m['tool_calls'] is defined and m['tool_calls'] is not none -%}<A>{%- if m['content'] is not none -%}"
            "{{ m['content'] }}{%- endif -%}"
            + JOINED_CALLS
            + "{%- else -%}{%- set content = m['content'] -%}"
            "{%- if '</think>' in content -%}{%- set content = content.split('</think>')[-1] -%}{%- endif -%}"
            "<A>{{ content }}<e>{%- endif -%}",
            "{%- elif m['role'] == 'tool' -%}<out>{{ m['content'] }}</out>",
        ),
        arguments="text",
        null="none",
    ),
    "deepseek v3.1": Shape(
        turns(
            "<U>{{ m['content'] }}",
            "{%- if m['tool_calls'] is defined -%}{%- for c in m['tool_calls'] -%}{{ '<call>' + c['function']['name'] }}<sep>"
            "{{ c['function']['arguments'] }}{{ '</call>' }}{%- endfor -%}{%- else -%}<A>{{ m['content'] }}<e>{%- endif -%}",
            "{%- elif m['role'] == 'tool' -%}<out>{{ m['content'] }}</out>",
        ),
        arguments="text",
    ),
    "glm 4": Shape("[gM]{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}" + GENERATE),
    "glm 4.5": Shape(
        "{%- macro visible(content) -%}{%- if content is string -%}{{ content }}{%- elif content is iterable and content is not "
        "mapping -%}{%- for i in content -%}{%- if i is mapping and i.type == 'text' -%}{{ i.text }}{%- endif -%}{%- endfor -%}"
        "{%- else -%}{{ content }}{%- endif -%}{%- endmacro -%}"
        + turns(
            "<U>{{ visible(m.content) }}",
            "<A>{% if m.reasoning_content is string and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
            "{{ visible(m.content) }}" + PAIR_CALLS,
            "{%- elif m.role == 'tool' -%}{% if m.content is string %}<obs>{{ m.content }}</obs>{% else %}"
            "{% for t in m.content %}<obs>{{ t.output if t.output is defined else t.text }}</obs>{% endfor %}{% endif %}",
        ),
        content="parts",
    ),
    "gemma": Shape(
        "{%- if messages[0]['role'] == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}"
        "{%- for m in messages -%}{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
        "{{ raise_exception('roles must alternate') }}{%- endif -%}<t>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m['content'] | trim }}<e>{%- endfor -%}" + GENERATE
    ),
    "gemma 3": Shape(
        "{%- if messages[0]['role'] == 'system' -%}{%- if messages[0]['content'] is string -%}"
        "{%- set prefix = messages[0]['content'] + '\\n\\n' -%}{%- else -%}"
        "{%- set prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}{%- endif -%}"
        "{%- set rest = messages[1:] -%}{%- else -%}"
        "{%- set prefix = '' -%}{%- set rest = messages -%}{%- endif -%}{%- for m in rest -%}"
        "{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}"
        "<t>{{ m.role }}\n{{ prefix if loop.first else '' }}{%- if m['content'] is string -%}{{ m['content'] | trim }}"
        "{%- elif m['content'] is iterable -%}{%- for i in m['content'] -%}{%- if i['type'] == 'text' -%}{{ i['text'] | trim }}"
        "{%- endif -%}{%- endfor -%}{%- else -%}{{ raise_exception('Invalid content type') }}{%- endif -%}<e>{%- endfor -%}"
        + GENERATE,
        content="parts",
    ),
    "gemma function calls": Shape(
        turns(
            USER,
            "[M]{{ m.content or '' }}{% for c in m.tool_calls or [] %}call:{{ c.function.name }}("
            "{%- for k, v in c.function.arguments | dictsort -%}{{ k }}:{{ v }}{%- endfor -%}){% endfor %}",
            TOOL,
        )
    ),
    "hermes": Shape(turns(USER, either(HERMES_CALLS), TOOL)),
    "phi 3": Shape(
        turns(
            "<|user|>{{ m.content }}<e>",
            "<|assistant|>{{ m.content }}<e>",
            system="<|system|>{{ m.content }}<e>",
        )
    ),
    "phi 4 mini": Shape(
        "{% for m in messages %}{% if m['role'] == 'system' and 'tools' in m and m['tools'] is not none %}"
        "{{ '<|system|>' + m['content'] + '<tools>' + m['tools'] }}{% else %}{{ '<|' + m['role'] + '|>' + m['content'] + '<e>' }}"
        "{% endif %}{% endfor %}" + GENERATE
    ),
    "command r": Shape(
        FIRST_SYSTEM
        + "{%- for m in rest -%}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('must alternate') }}"
        "{%- endif -%}{%- set content = m.content -%}{{ '<' + m.role + '>' + content.strip() }}{%- endfor -%}"
        + GENERATE
    ),
    "command r tools": Shape(
        turns(
            USER,
            "{%- if m.tool_calls is defined and m.tool_calls -%}Action: [{%- for c in m.tool_calls -%}"
            "{{ {'tool_name': c.function.name, 'parameters': c.function.arguments} | tojson }}{%- endfor -%}]{%- else -%}"
            "[A]{{ m.content }}{%- endif -%}",
            TOOL,
        )
    ),
    "gpt-oss": Shape(
        "{%- if messages[0].role == 'developer' or messages[0].role == 'system' -%}[D]{{ messages[0].content }}[/D]"
        "{%- set rest = messages[1:] -%}{%- else -%}{%- set rest = messages -%}{%- endif -%}"
        "{%- set last = namespace(name=none) -%}"
        "{%- for m in rest -%}{%- if m.role == 'assistant' -%}{%- if 'tool_calls' in m -%}"
        "{%- if m.content and m.thinking -%}{{ raise_exception('content and thinking both') }}{%- elif m.content -%}"
        "<analysis>{{ m.content }}{%- elif m.thinking -%}<analysis>{{ m.thinking }}{%- endif -%}"
        "{%- set c = m.tool_calls[0].function -%}{%- set last.name = c.name -%}<to={{ c.name }}>{{ c.arguments | tojson }}"
        "{%- else -%}<final>{{ m.content }}{%- endif -%}{%- elif m.role == 'tool' -%}{%- if last.name is none -%}"
        "{{ raise_exception('a result without a call') }}{%- endif -%}<{{ last.name }}>{{ m.content | tojson }}"
        "{%- elif m.role == 'user' -%}<user>{{ m.content }}{%- endif -%}{%- endfor -%}" + GENERATE
    ),
    "kimi k2": Shape(
        "{%- macro shown(m) -%}{%- set content = m.get('content') -%}{%- if content is string -%}{{ content }}"
        "{%- elif content is not none -%}{%- for c in content -%}"
        "{%- if c['type'] == 'text' -%}{{ c['text'] }}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endmacro -%}"
        "{%- for m in messages -%}<{{ m.role }}>{%- if m.role == 'assistant' and m.get('tool_calls') -%}"
        "{{ shown(m) }}{%- for c in m['tool_calls'] -%}<id>{{ c['id'] }}"
        "{% if c['function']['arguments'] is string %}{{ c['function']['arguments'] }}{% else %}"
        "{{ c['function']['arguments'] | tojson }}{% endif %}{%- endfor -%}{%- elif m.role == 'tool' -%}"
        "## Return of {{ m.tool_call_id }}\n{{ shown(m) }}{%- else -%}{{ shown(m) }}{%- endif -%}<e>{%- endfor -%}"
        + GENERATE,
        content="parts",
        null="none",
    ),
    "minimax m2": Shape(
        MACRO
        + turns(
            "[U]{{ shown(m.content) }}",
            "[A]{{ shown(m.content) }}{% if m.tool_calls %}{% for c in m.tool_calls %}{% if c.function %}{% set c = c.function %}"
            '{% endif %}<invoke name="{{ c.name }}">{% set args = c.arguments %}{% for k, v in args.items() %}<p name="{{ k }}">'
            "{{ v | tojson if v is not string else v }}</p>{% endfor %}</invoke>{% endfor %}{% endif %}",
            "{%- elif m.role == 'tool' -%}[T]{{ shown(m.content) }}",
        ),
        content="parts",
        null="none",
    ),
    "granite 3": Shape(
        "{%- for m in messages -%}{%- if m['role'] == 'assistant' and 'tool_calls' in m -%}<A>{{ m['tool_calls'] | tojson }}"
        "{%- else -%}<{{ m['role'] }}>{{ m['content'] }}{%- endif -%}<e>{%- endfor -%}" + GENERATE
    ),
    "granite 4": Shape(
        "{%- for m in messages -%}{%- if m.content is string -%}{%- set content = m.content -%}{%- else -%}"
        "{%- set ns = namespace(val='') -%}{%- for e in m.content -%}{%- if e.type == 'text' -%}"
        "{%- set ns.val = ns.val + e.text -%}{%- endif -%}{%- endfor -%}{%- set content = ns.val -%}{%- endif -%}"
        "<{{ m.role }}>{{ content }}"
        + EITHER_CALLS.replace(" or []", "|default([])")
        + "<e>{%- endfor -%}"
        + GENERATE,
        content="parts",
    ),
    "smollm 2": Shape(
        "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}<s>system: be helpful<e>{% endif %}"
        "{{ '<s>' + m['role'] + '\\n' + m['content'] + '<e>' }}{% endfor %}" + GENERATE
    ),
    "smolvlm": Shape(
        "{% for m in messages %}{{ m['role'] | capitalize }}{% if m['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
        "{% for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}{% endif %}{% endfor %}<e>{% endfor %}"
        + GENERATE,
        content="only parts",
    ),
    "smollm 3": Shape(
        turns(
            USER,
            "{%- set content = m.content if m.content is string else '' -%}[A]{{ content.lstrip('\\n') }}"
            "{%- if m.tool_calls -%}" + HERMES_CALLS + "{%- endif -%}",
            TOOL,
        )
    ),
    "zephyr": Shape(
        "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] + eos_token }}{% endfor %}" + GENERATE
    ),
    "vicuna": Shape(
        FIRST_SYSTEM
        + turns("USER: {{ m.content }}", "ASSISTANT: {{ m.content }}</s>").replace("in messages", "in rest")
    ),
    "olmo 2": Shape(
        "{{ bos_token }}"
        + turns("<|user|>\n{{ m['content'] }}\n", "<|assistant|>\n{{ m['content'] }}{{ eos_token }}")
    ),
    "functionary": Shape(
        turns(
            USER,
            "[A]{% if m['content'] is not none %}{{ m['content'] }}{% endif %}"
            "{% if 'tool_calls' in m and m['tool_calls'] is not none %}"
            "{% for c in m['tool_calls'] %}<f>{{ c['function']['name'] + '\\n' + c['function']['arguments'] }}"
            "{% endfor %}{% endif %}",
            TOOL,
        ),
        arguments="text",
        null="none",
    ),
    "nemotron": Shape(
        turns(
            USER,
            "{%- set content = (m.content | default('', true)) | string -%}[A]{{ content | trim }}"
            + EITHER_CALLS,
            TOOL,
        )
    ),
    "hunyuan": Shape(
        FIRST_SYSTEM
        + "{%- for m in rest -%}{%- if m.role == 'assistant' and m.tool_calls -%}{%- for c in m.tool_calls -%}"
        "{%- if loop.first -%}<calls>{%- endif -%}{{ c.function.name ~ '<args>' ~ c.function.arguments }}{%- endfor -%}"
        "{%- else -%}<{{ m.role }}>{{ m.content }}{%- endif -%}{%- endfor -%}",
        arguments="text",
    ),
}
