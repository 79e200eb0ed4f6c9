"""Chat templates: where they come from, how they render beside transformers' own renderer, and what errors say."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from kvern_engine.loading.chat_template import ChatTemplate, ChatTemplateError
from kvern_engine.loading.resolve import ModelFiles
from kvern_engine.tokenizer import Tokenizer, load_tokenizer

USER = [{"role": "user", "content": "What is the capital of France?"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say <b>1 & 2</b>"},
    {"role": "assistant", "content": "ja, é 日本"},
    {"role": "user", "content": "Thanks"},
]


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2: ModelFiles) -> Tokenizer:
    return load_tokenizer(smollm2)


def test_smollm2_prompt_and_its_ids(smollm2_tokenizer: Tokenizer) -> None:
    prompt = smollm2_tokenizer.render_chat(USER)
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = smollm2_tokenizer.encode(prompt, add_special_tokens=False)
    assert ids[0] == 1 and ids.count(1) == 3 and ids.count(2) == 2
    assert smollm2_tokenizer.render_chat(TALK, add_generation_prompt=False).endswith("Thanks<|im_end|>\n")


FEATURES = """
{%- if tools %}
    {{- 'TOOLS ' + tools | tojson }}
{%- endif %}
{% for message in messages %}
    {% if message.role == 'skip' %}
        {% continue %}
    {% endif %}
    {{- bos_token + message['role'] + ': ' }}
    {% generation %}{{ message['content'] | trim }}{% endgeneration %}
{% endfor %}
{%- if add_generation_prompt %}{{ '>' ~ style | default('none') }}{% endif %}
{{ {'é': '<x>'} | tojson(indent=2) }}
"""


@pytest.mark.parametrize("kwargs", [{}, {"tools": [{"name": "f", "é": "<&>"}]}, {"style": "x"}])
@pytest.mark.parametrize("generation", [True, False])
def test_rendering_equals_transformers(kwargs: dict[str, Any], generation: bool) -> None:
    talk = [*TALK, {"role": "skip", "content": "hidden"}]
    own = ChatTemplate({"default": FEATURES}, {"bos_token": "<s>"})
    arguments = {"add_generation_prompt": generation, **kwargs}
    expected, _ = render_jinja_template([talk], chat_template=FEATURES, bos_token="<s>", **arguments)
    assert own.render(talk, **arguments) == expected[0]
    assert "hidden" not in expected[0] and "Say <b>1 & 2</b><s>assistant: " in expected[0]


def test_content_parts_are_joined() -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": parts}]) == "a\nb"
    with pytest.raises(ChatTemplateError, match="content part of type 'image_url' is not supported; this model takes"):
        template.render([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    with pytest.raises(ChatTemplateError, match="content part of type 'str'"):
        template.render([{"role": "user", "content": ["a"]}])


def test_dates_and_tool_templates() -> None:
    template = ChatTemplate({"default": "plain {{ strftime_now('%Y') }}", "tool_use": "tools"}, {})
    assert template.render(USER) == f"plain {datetime.now().year}"
    assert template.render(USER, tools=[{"name": "f"}]) == "tools" and template.render(USER, tools=[]) != "tools"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ raise_exception('roles must alternate') }}", "^roles must alternate$"),
        ("{{ messages[0]['content'] + 1 }}", "^the chat template cannot render these messages: can only concatenate"),
        ("{{ messages[7].content.x }}", "cannot render these messages: .*no element 7"),
        ("{{ ''.__class__.__mro__ }}", "cannot render these messages: .*unsafe"),
        ("{{ messages.append(1) }}", "cannot render these messages: .*'append' of 'list' object is unsafe"),
        ("{% for i in range(10000000) %}{% endfor %}", "cannot render these messages: Range too big"),
    ],
)
def test_rendering_errors(source: str, text: str) -> None:
    with pytest.raises(ChatTemplateError, match=text):
        ChatTemplate({"default": source}, {}).render(USER)


def test_a_broken_template_fails_when_loaded(tiny_kjv: ModelFiles) -> None:
    with pytest.raises(ChatTemplateError, match=r"the chat template is not valid Jinja \(line 2\): "):
        load_tokenizer(tiny_kjv, chat_template="{% if x %}\n{% endfor %}")
    with pytest.raises(ChatTemplateError, match=r"chat_template: no such file 'absent\.jinja'; give a file"):
        load_tokenizer(tiny_kjv, chat_template="absent.jinja")


def test_a_model_without_a_template_says_so(tiny_kjv: ModelFiles) -> None:
    tokenizer = load_tokenizer(tiny_kjv)
    assert tokenizer.chat_template is None
    with pytest.raises(ChatTemplateError, match=r"this model has no chat template; pass --chat-template FILE"):
        tokenizer.render_chat(USER)


def test_where_templates_come_from(tiny_kjv: ModelFiles, smollm2: ModelFiles, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((tiny_kjv.path / name).read_bytes())
    files = ModelFiles("m", "folder", tmp_path)

    def configured(**fields: Any) -> str:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|endoftext|>", **fields}))
        return load_tokenizer(files).render_chat(USER)

    assert configured(chat_template="A{{ bos_token }}") == "A<|endoftext|>"
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    assert configured(chat_template=named) == "D" and configured(chat_template=named[:1]) == "R"
    (tmp_path / "chat_template.jinja").write_text("J{{ messages[0].role }}\n")
    assert configured(chat_template="A") == "Juser"
    given = tmp_path / "given.jinja"
    given.write_text("G {{ messages | length }}")
    for model in (files, smollm2):
        tokenizer = load_tokenizer(model, chat_template=str(given))
        assert tokenizer.render_chat(USER) == "G 1" and tokenizer.chat_template == "G {{ messages | length }}"
