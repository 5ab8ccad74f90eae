"""Chat templates: Jinja2 templates, published with a checkpoint, that render a conversation.

Templates are untrusted, so they run in Jinja2's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Optional

import jinja2
import jinja2.meta
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from glm_multiuser.checkpoint.files import read_text
from glm_multiuser.errors import CheckpointError, InvalidParameterError
from glm_multiuser.tokenizers.folder import read_special_tokens, read_tokenizer_config
from glm_multiuser.tokenizers.text import Objects

TEMPLATE_FILE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates/*.jinja"
"""Newer form of the template list in `tokenizer_config.json`; files are named after templates."""

LONGEST = 1 << 26
"""Characters of a prompt: an untrusted template could otherwise fill the memory."""

CHAT_ML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""For checkpoints with the special tokens of ChatML but without a template."""


class GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}`: marks generated text, for training only.

    Renders like transformers' `AssistantTracker`: variables set inside are scoped to the block.
    """

    tags = {"generation"}  # noqa: RUF012 (an attribute of instances, for Jinja2's type)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class ChatTemplate:
    """A template, parsed once; thread-safe.

    Args:
        name: file name for error messages.
        constants: further variables of the template, such as `eos_token`.
        for_tools: source of a separate template for conversations with tools.

    Attributes:
        for_tools: the template for conversations with tools, by default this one.
        takes_tools: whether that template writes tools.

    Raises:
        CheckpointError: a source that Jinja2 cannot parse.
    """

    def __init__(
        self,
        source: str,
        name: str = "chat_template",
        constants: Optional[Mapping[str, str]] = None,
        for_tools: Optional[str] = None,
    ) -> None:
        # Templates expect the settings and globals of transformers.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationBlock],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        environment.globals.update(constants or {})
        try:
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"{name} line {error.lineno} is not Jinja2: {error}") from None
        self.source = source
        self.for_tools = ChatTemplate(for_tools, name, constants) if for_tools else self
        self.takes_tools: bool = (
            self.for_tools.takes_tools if for_tools else "tools" in names and self._writes_tools()
        )

    @classmethod
    def from_folder(cls, folder: Path) -> Optional[ChatTemplate]:
        """Reads `chat_template.jinja` and `MORE_TEMPLATES`, or else `chat_template` of
        `tokenizer_config.json`.

        Returns None for a folder without any, such as a base model's. As in transformers, the
        template named "tool_use" renders conversations with tools, and "default"
        (`chat_template.jinja`) all others; if only one of them exists, it renders all.

        Raises:
            CheckpointError: a file that cannot be read, or a template of another kind.
        """
        config = read_tokenizer_config(folder)
        where = f"{TEMPLATE_FILE} or {MORE_TEMPLATES} in {folder}"
        named: dict[str, Any] = {file.stem: read_text(file) for file in folder.glob(MORE_TEMPLATES)}
        if (folder / TEMPLATE_FILE).exists():
            named["default"] = read_text(folder / TEMPLATE_FILE)
        if not named.keys() & {"default", "tool_use"}:
            where = f"chat_template of tokenizer_config.json in {folder}"
            found: Any = config.get("chat_template")
            if not found:
                return None
            entries = found if isinstance(found, list) else [{"name": "default", "template": found}]
            entries = [one for one in entries if isinstance(one, dict)]
            named = {str(one.get("name")): one.get("template") for one in entries}
        for_tools = named.get("tool_use")
        source: Any = named.get("default") or for_tools
        for one in (source, for_tools or ""):
            if not isinstance(one, str):
                raise CheckpointError(f"{where} is {type(one).__name__}; it must be a string")
        return cls(source, where, read_special_tokens(folder).by_role, for_tools)

    def _writes_tools(self) -> bool:
        """Tries it: GLM-4's template has a variable `tools`, but takes its value from messages."""
        messages = [{"role": "user", "content": ""}]
        function = {"name": "f", "description": "", "parameters": {}}
        try:
            return self.render(messages) != self.render(
                messages, [{"type": "function", "function": function}]
            )
        except InvalidParameterError:
            return True  # it needs something else to write them

    def render(
        self, messages: Objects, tools: Sequence[Any] = (), add_generation_prompt: bool = True
    ) -> str:
        """Writes a conversation, and with `add_generation_prompt` the beginning of the answer.

        Raises:
            InvalidParameterError: a conversation that the template refuses or cannot write, or of
                which it makes more than `LONGEST` characters.
        """
        written, length = [], 0
        try:
            for piece in (self.for_tools if tools else self)._template.generate(
                messages=list(messages),
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            ):
                length += len(piece)
                if length > LONGEST:
                    raise ValueError(f"it writes more than {LONGEST} characters")
                written.append(piece)
            return "".join(written)
        except Exception as error:  # a template raises whatever its expressions raise
            raise InvalidParameterError(
                f"messages cannot be written by this checkpoint's chat template: {error}",
                field="messages",
            ) from None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Optional[int] = None,
    separators: Optional[tuple[str, str]] = None,
    sort_keys: bool = False,
) -> str:
    # Jinja2's own filter escapes for HTML, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
