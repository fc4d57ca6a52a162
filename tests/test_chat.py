"""Chat templates: prefixes and suffixes cut out of what the model's own template writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny

from edge_pc.errors import ModelError, OptionError
from edge_pc.models.chat_template import Affixes, ChatTemplate

LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    "+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
ALTERNATING = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}"
    "{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
    "{% else %} {{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def test_a_default_system_prompt_belongs_to_the_first_prefix() -> None:
    chat = ChatTemplate(tiny.CHAT_TEMPLATE, {})
    assert chat.affixes("system", first=True) == Affixes("<|im_start|>system\n", "<|im_end|>\n")
    default = "<|im_start|>system\nYou are tiny.<|im_end|>\n"
    assert chat.affixes("user", first=True) == Affixes(default + "<|im_start|>user\n", "<|im_end|>\n")
    assert chat.affixes("user", first=False) == Affixes("<|im_start|>user\n", "<|im_end|>\n")
    assert chat.affixes("assistant", first=False) == Affixes("<|im_start|>assistant\n", "<|im_end|>\n")
    assert chat.generation_prompt == "<|im_start|>assistant\n"
    chat.check(["system", "user", "assistant", "user"])
    chat.check([])


def test_a_bos_stands_in_the_first_prefix_only() -> None:
    chat = ChatTemplate(LLAMA3, {"bos_token": "<|begin_of_text|>"})
    header = "<|start_header_id|>user<|end_header_id|>\n\n"
    assert chat.affixes("user", first=True) == Affixes("<|begin_of_text|>" + header, "<|eot_id|>")
    assert chat.affixes("user", first=False) == Affixes(header, "<|eot_id|>")
    chat.check(["system", "user", "assistant"])


def test_a_templates_own_complaint_is_one_clear_line() -> None:
    chat = ChatTemplate(ALTERNATING, TOKENS)
    assert chat.affixes("user", first=True) == Affixes("<s>[INST] ", " [/INST]")
    assert chat.affixes("user", first=False) == Affixes("[INST] ", " [/INST]")
    assert chat.affixes("assistant", first=False) == Affixes(" ", "</s>")
    assert chat.generation_prompt == ""
    chat.check(["user", "assistant", "user"])
    with pytest.raises(OptionError) as caught:
        chat.check(["user", "user"])
    assert str(caught.value) == (
        "the model's chat template refuses the turns user, user: Roles must alternate user/assistant"
    )
    with pytest.raises(OptionError, match="refuses the turns system"):
        chat.affixes("system", first=True)


def test_what_depends_on_the_turns_around_is_found() -> None:
    last_only = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if loop.last %}<end>{% endif %}{% endfor %}"
    with pytest.raises(ModelError, match="earlier turns in another way before a user turn"):
        ChatTemplate(last_only, {}).affixes("user", first=False)
    counted = "{% for m in messages %}<{{ m.role }} {{ loop.index }}>{{ m.content }}{% endfor %}"
    chat = ChatTemplate(counted, {})
    chat.check(["user", "assistant", "user"])
    with pytest.raises(ModelError, match="depends on the turns around"):
        chat.check(["user", "assistant", "user", "assistant"])


def test_contents_that_a_template_drops_or_repeats() -> None:
    with pytest.raises(ModelError, match="no single place for the text of a system turn"):
        ChatTemplate("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}", {}).affixes(
            "system", True
        )
    with pytest.raises(ModelError, match="no single place"):
        ChatTemplate("{% for m in messages %}{{ m.content }} {{ m.content }}{% endfor %}", {}).affixes("user", True)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for m in messages %}", "not valid Jinja"),
        ("{{ messages[7].content.upper() }}", "cannot be rendered"),
        ("{{ strftime_now('%d') }}{{ messages[0].content }}", "'strftime_now' is undefined"),
        ("{{ messages.append(1) }}{{ messages[0].content }}", "cannot be rendered"),
        ("{{ ''.__class__.__mro__ }}{{ messages[0].content }}", "cannot be rendered"),
        ("{% for i in range(10 ** 9) %}{% endfor %}{{ messages[0].content }}", "cannot be rendered"),
    ],
)
def test_broken_and_hostile_templates(source: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ChatTemplate(source, {}).affixes("user", first=True)


def test_templates_that_ask_for_tools_see_none() -> None:
    source = "{% if tools is not none %}TOOLS{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert ChatTemplate(source, {}).affixes("user", first=True) == Affixes("", "")


def test_a_model_without_a_template() -> None:
    with pytest.raises(ModelError, match="has no chat template"):
        ChatTemplate(None, {}).affixes("user", first=True)
    with pytest.raises(ModelError, match="has no chat template"):
        ChatTemplate(None, {}).check(["user"])


@pytest.mark.parametrize("roles", [["user"], ["system", "user"], ["user", "assistant", "user"]])
def test_the_same_text_as_transformers(roles: list[str], tiny_hf: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_hf)
    messages = [{"role": role, "content": f"text {i}"} for i, role in enumerate(roles)]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    chat = ChatTemplate(tiny.CHAT_TEMPLATE, {})
    text = ""
    for i, message in enumerate(messages):
        affixes = chat.affixes(message["role"], first=i == 0)  # type: ignore[arg-type]
        text += affixes.prefix + message["content"] + affixes.suffix
    assert text + chat.generation_prompt == expected
