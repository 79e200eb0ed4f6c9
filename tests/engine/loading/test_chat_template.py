"""Chat templates: where they come from, how they render beside transformers' own renderer, and what errors say."""

import gc
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from kvern_engine.loading.chat_template import (
    ChatTemplate,
    ChatTemplateError,
    ChatTemplateTimeoutError,
    read_sources,
)
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
        (
            "{{ raise_exception('roles must alternate') }}",
            "^the chat template refuses these messages: roles must alternate \\(template default, line 1\\)$",
        ),
        (
            "\n{{ messages[0]['content'] + 1 }}",
            r"^the chat template cannot render these messages: can only concatenate .* \(template default, line 2\)$",
        ),
        ("{{ messages[7].content.x }}", "cannot render these messages: .*no element 7"),
        ("{{ ''.__class__.__mro__ }}", "cannot render these messages: .*unsafe.* line 1"),
        ("{{ cycler.__init__.__globals__ }}", "cannot render these messages: .*unsafe.* line 1"),
        ("{{ messages.append(1) }}", "cannot render these messages: .*'append' of 'list' object is unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "cannot render these messages: Range too big.* line 1"),
        ("\n{% include 'default' %}", "cannot render these messages: no loader .* line 2"),
        ("{% extends 'default' %}", "cannot render these messages: no loader"),
        ("{% import 'default' as x %}", "cannot render these messages: no loader"),
        (
            "{% macro again() %}\n\n{{ again() }}{% endmacro %}{{ again() }}",
            r"cannot render these messages: it calls itself without end \(template default, line 3\)$",
        ),
        (
            "{% for i in range(99999) %}\n{{ messages[1].content * 1000 }}{% endfor %}",
            r"makes more than 16,777,216 characters of these messages \(template default, line 2\)$",
        ),
        (
            "\n{{ 'x' * 10**10 }}",
            r"needs more than 1,024 MiB of memory for these messages \(template default, line 2\)$",
        ),
        ("{{ 'x'.ljust(10**11) }}", "needs more than 1,024 MiB of memory"),
    ],
)
def test_rendering_errors(source: str, text: str) -> None:
    template = ChatTemplate({"default": "{% if messages[1] %}" + source + "{% else %}fine{% endif %}"}, {})
    with pytest.raises(ChatTemplateError, match=text):
        template.render([*USER, {"role": "user", "content": "x"}])
    assert template.render(USER) == "fine"  # what a conversation did harms no other


@pytest.mark.parametrize(
    ("source", "line"),
    [
        # As many steps as there are atoms, from ranges that are small enough each.
        ("{% for a in range(99999) %}{% for b in range(99999) %}\n{% for c in range(99999) %}{% endfor %}", 2),
        ("{% macro two(n) %}{{ two(n - 1) if n }}\n{{ two(n - 1) if n }}{% endmacro %}{{ two(99) }}", None),
        # A list of 2**60 entries that is two entries long.
        ("{% set n = namespace(x=[]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}\n{{ n.x }}", 2),
    ],
)
def test_templates_without_end_are_stopped(source: str, line: int | None) -> None:
    closing = "{% endfor %}" * (source.count("{% for") - source.count("{% endfor"))
    template = ChatTemplate({"default": "{% if messages[1] %}" + source + closing + "{% endif %}fine"}, {}, seconds=0.2)
    with pytest.raises(ChatTemplateTimeoutError) as caught:
        template.render([*USER, *USER])
    message = "the chat template takes more than 0.2 seconds of processor time for these messages (template default, "
    assert str(caught.value).startswith(message) and isinstance(caught.value, TimeoutError)
    assert line is None or str(caught.value).endswith(f"line {line})")
    assert template.render(USER) == "fine"


@pytest.mark.skipif(os.environ.get("KVERN_TEST_FULL") != "1", reason="seconds of processor time: KVERN_TEST_FULL=1")
def test_a_call_that_never_comes_back_ends_with_its_process() -> None:
    """Comparing two lists of 2**60 entries keeps the processor busy for years within one instruction of Python."""
    source = (
        "{% if messages[1] %}{% set n = namespace(x=[], y=[]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}"
        "{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}{% endif %}fine"
    )
    template = ChatTemplate({"default": source}, {}, seconds=0.2)
    with pytest.raises(ChatTemplateTimeoutError, match=r"takes more than 0\.2 seconds .* \(template default\)$"):
        template.render([*USER, *USER])
    assert template.render(USER) == "fine"


def test_a_template_cannot_hold_up_its_compilation() -> None:
    """Constants are folded while a template is compiled: that has limits too."""
    template = ChatTemplate({"default": "{{ 'x' * 10**10 }}"}, {}, seconds=0.5)
    with pytest.raises(ChatTemplateError, match=r"memory|seconds"):
        template.render(USER)
    deep = "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"
    with pytest.raises(ChatTemplateError, match=r"not valid Jinja \(template default\): it is nested too deeply"):
        ChatTemplate({"default": deep}, {}).check()
    with pytest.raises(ChatTemplateError, match=r"the chat templates have 2,000,000 characters; at most 1,048,576 are"):
        ChatTemplate({"default": "x" * 2_000_000}, {})


def test_secrets_and_files_are_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a template gets hold of in its process: the environment of the server is not there."""
    monkeypatch.setenv("KVERN_API_KEYS", "secret")
    template = ChatTemplate({"default": "x"}, {})
    assert template.render(USER) == "x"
    process = template._short._process
    assert process is not None
    environment = Path(f"/proc/{process._popen.pid}/environ").read_bytes()
    assert b"secret" not in environment
    limits = Path(f"/proc/{process._popen.pid}/limits").read_text()
    assert re.search(r"Max address space +1073741824 +1073741824", limits)
    assert re.search(r"Max file size +0 +0", limits)


def test_the_process_ends_with_its_template() -> None:
    template = ChatTemplate({"default": "x"}, {})
    process = template._short._process
    assert process is not None and template.render(USER) == "x"
    popen = process._popen
    assert popen.poll() is None
    del template, process
    gc.collect()
    assert popen.poll() is not None
    broken = ChatTemplate({"default": "{{"}, {})
    with pytest.raises(ChatTemplateError):
        broken.check()
    assert broken._short._process is not None and broken._short._process._popen.poll() is not None


def test_threads_share_a_template() -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    with ThreadPoolExecutor(4) as pool:
        texts = [f"{index} é\ud800" * 1000 for index in range(40)]
        found = pool.map(lambda text: template.render([{"role": "user", "content": text}]), texts)
        assert list(found) == texts


def test_a_long_conversation_keeps_no_short_one_waiting() -> None:
    source = "{% for message in messages %}{% for i in range(99999) %}{% endfor %}{{ loop.index }} {% endfor %}"
    template = ChatTemplate({"default": source}, {})
    template.check()
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(lambda: template.render(USER * 100, long=True))
        assert template.render(USER) == "1 " and not long.done()
        assert long.result().endswith(" 100 ")


def test_values_that_are_no_json_are_named() -> None:
    with pytest.raises(ChatTemplateError, match=r"^messages must be values of JSON: Object of type object is not JSON"):
        ChatTemplate({"default": "x"}, {}).render([{"role": "user", "content": object()}])


def test_the_role_that_a_template_lacks_is_named() -> None:
    """Gemma's templates know no system role and say so."""
    source = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for message in messages %}{{ message['role'] }}{% endfor %}"
    )
    template = ChatTemplate({"default": source}, {})
    with pytest.raises(ChatTemplateError) as caught:
        template.render(TALK)
    assert str(caught.value) == (
        "the chat template refuses these messages: System role not supported (template default, line 1)"
    )
    assert template.render(TALK[1:]) == "userassistantuser"


def test_variables_that_templates_read() -> None:
    sources = {"default": "{{ bos_token }}{{ messages }}{% set x = y %}{{ x }}", "tool_use": "{{ tools }}"}
    assert ChatTemplate(sources, {}).check() == {"bos_token", "messages", "y", "tools"}


def test_a_broken_template_fails_when_loaded(tiny_kjv: ModelFiles) -> None:
    with pytest.raises(ChatTemplateError, match=r"the chat template is not valid Jinja \(template default, line 2\): "):
        load_tokenizer(tiny_kjv, chat_template="{% if x %}\n{% endfor %}")
    with pytest.raises(ChatTemplateError, match=r"chat_template: no such file 'absent\.jinja'; give a file"):
        load_tokenizer(tiny_kjv, chat_template="absent.jinja")
    with pytest.raises(ChatTemplateError, match=r"not valid Jinja \(template tool_use, line 3\): Encountered unknown"):
        ChatTemplate({"default": "x", "tool_use": "\n\n{% while true %}{% endwhile %}"}, {}).check()


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
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "O"}))
    assert configured(chat_template="A") == "O"
    (tmp_path / "chat_template.jinja").write_text("J{{ messages[0].role }}\n")
    assert configured(chat_template="A") == "Juser"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("T{{ tools | length }}")
    assert load_tokenizer(files).render_chat(USER, tools=[{"name": "f"}]) == "T1"
    assert load_tokenizer(files).render_chat(USER) == "Juser"
    with pytest.raises(ChatTemplateError, match=r"chat_template must be a template or a list of objects with name and"):
        read_sources(tmp_path / "elsewhere", {"chat_template": [{"name": "x"}]})
    given = tmp_path / "given.jinja"
    given.write_text("G {{ messages | length }}")
    for model in (files, smollm2):
        tokenizer = load_tokenizer(model, chat_template=str(given))
        assert tokenizer.render_chat(USER) == "G 1" and tokenizer.chat_template == "G {{ messages | length }}"
