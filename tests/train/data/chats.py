"""Conversations, chat templates and a chat model's tokenizer for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.train.data.corpora import write_tokenizer

TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
CALLS = "{% for call in m.tool_calls %}<call>{{ call.function | tojson }}{% endfor %}"
HEAD = "<|im_start|>{{ m.role }}\n"
TAIL = "{{ m.content or '' }}{% if m.tool_calls %}" + CALLS + "{% endif %}<|im_end|>\n"
END = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PLAIN = "{{ bos_token }}" + TOOLS + "{% for m in messages %}" + HEAD + TAIL + "{% endfor %}" + END
BRANCH = (
    "{% if m.role == 'assistant' %}{% generation %}" + TAIL + "{% endgeneration %}{% else %}" + TAIL + "{% endif %}"
)
MARKED = PLAIN.replace(TAIL, BRANCH)
STRICT = (
    "{% if messages | length > 1 and messages[0].role == messages[1].role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}" + PLAIN
)
FORGETFUL = PLAIN.replace("m.content", "(m.content if loop.last or m.role == 'user' else 'forgotten')")
TRIMMED = "{% for m in messages %}" + HEAD + "{{ m.content | trim }}<|im_end|>\n{% endfor %}" + END
RAW_CALLS = PLAIN.replace("call.function | tojson", "call.function.name ~ ' ' ~ call.function.arguments")
SILENT = "{% for m in messages if m.role == 'user' %}" + HEAD + TAIL + "{% endfor %}"


def write_chat_tokenizer(folder: Path, template: str | None = PLAIN) -> Path:
    """Writes a folder of a tokenizer with the special tokens of `template`, and returns it."""
    write_tokenizer(folder, special=("<s>", "<|im_start|>", "<|im_end|>"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    content = json.loads((folder / "tokenizer.json").read_text()) | {"truncation": None}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def write_rows(path: Path, rows: list[Any]) -> Path:
    """Writes JSON lines and returns their file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def messages(*contents: str, system: str | None = None) -> dict[str, Any]:
    """Returns a row of turns of the user and the assistant."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return {"messages": [*([{"role": "system", "content": system}] if system is not None else []), *turns]}
